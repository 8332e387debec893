// torch binding of kvp/bulk_copy.hpp; the CUDA version is in bulk_copy.cu.
#include "kvp/bulk_copy.hpp"

#include <cstdlib>
#include <memory>
#include <new>

#include "bulk_check.hpp"
#include "kvp/page_check.hpp"

namespace kvp::binding {
namespace {

void require_pages(const char* op, const char* ids_name, const char* name,
                   const PageSide& side, std::int64_t n) {
  if (side.ids == nullptr) return;
  const Status status = check_pages(side.ids, n, side.num_pages);
  if (status.ok()) return;
  fail(op, ids_name, "[", status.index, "] is page ", status.value, ", but ", name,
       " has pages 0 to ", side.num_pages - 1);
}

// Cost: two bit operations per page. calloc does not map the parts of the bitmap that no
// page touches.
void require_distinct(const char* op, const PageSide& target, std::int64_t n) {
  if (target.ids == nullptr || n == 0) return;
  const PageSpan span = span_of(target.ids, n);
  std::unique_ptr<std::uint64_t, decltype(&std::free)> bitmap(
      static_cast<std::uint64_t*>(std::calloc(
          static_cast<std::size_t>(span.bitmap_words(1)), sizeof(std::uint64_t))),
      &std::free);
  if (!bitmap) throw std::bad_alloc();
  const Status status = check_distinct_pages(target.ids, n, span, bitmap.get());
  if (status.ok()) return;
  fail(op, "target_ids[", status.index, "] (page ", status.value,
       ") repeats an earlier one; target pages must differ");
}

void copy_pages_cpu(const Tensor& target, const std::optional<Tensor>& target_ids,
                    const Tensor& source, const std::optional<Tensor>& source_ids) {
  const char* op = "copy_pages";
  const PageCopy copy = view_copy(op, target, target_ids, source, source_ids);
  require_pages(op, "target_ids", "target", copy.target, copy.n);
  require_pages(op, "source_ids", "source", copy.source, copy.n);
  require_distinct(op, copy.target, copy.n);
  bulk::copy_pages({static_cast<std::uint8_t*>(target.mutable_data_ptr()),
                    copy.target.stride_bytes, copy.target.ids},
                   {static_cast<const std::uint8_t*>(source.const_data_ptr()),
                    copy.source.stride_bytes, copy.source.ids},
                   copy.n, copy.target.page_bytes);
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def(
      "copy_pages(Tensor(a!) target, Tensor? target_ids, Tensor source, "
      "Tensor? source_ids) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("copy_pages", TORCH_BOX(&kvp::binding::copy_pages_cpu));
}
