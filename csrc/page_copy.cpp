// torch bindings of the page copies, and their CPU implementations.
//
// Every function checks its arguments once and then calls a loop of
// kvp/page_copy.hpp. The schemas are shared with page_copy.cu, which registers
// the CUDA twins; `natural` is for those alone (see there).
#include "kvp/page_copy.hpp"

#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <tuple>

#include "binding.hpp"
#include "kvp/page_check.hpp"

namespace kvp::binding {
namespace {

void require_ok(const char* op, const char* name, const Status& status,
                std::int64_t limit) {
  const std::int64_t i = status.index;
  const std::int64_t value = status.value;
  switch (status.fault) {
    case Fault::kNone:
      return;
    case Fault::kPageOutOfRange:
      fail(op, name, "[", i, "] is page ", value, ", but the heap has pages 0 to ",
           limit - 1);
    case Fault::kSlotOutOfRange:
      fail(op, name, "[", i, "] is slot ", value, ", but pages have slots 0 to ",
           limit - 1);
    case Fault::kOffsetOutOfRange:
      fail(op, name, "[", i, "] is offset ", value,
           ", but pages have elements 0 to ", limit - 1);
    case Fault::kDuplicateDestination:
      fail(op, "destination ", i, " (page ", value / limit, ", slot ",
           value % limit, ") repeats an earlier one; destinations must differ");
    case Fault::kSourceIsDestination:
      fail(op, "source ", i, " (page ", value / limit, ", slot ", value % limit,
           ") is also a destination; move through a free page instead");
  }
}

const std::int32_t* checked_offsets(const char* op, const char* name,
                                    const Tensor& heap, const HeapView& view,
                                    const Tensor& table) {
  const std::int32_t* offsets =
      Argument{op, name, table}.offsets(heap, view.plane_elems);
  const std::int64_t page_elems = 2 * view.plane_elems;
  require_ok(op, name, check_offsets(offsets, view.plane_elems, page_elems),
             page_elems);
  return offsets;
}

PageLayout checked_layout(const char* op, const Tensor& heap,
                          const HeapView& view, const Tensor& k_offsets,
                          const Tensor& v_offsets) {
  return make_layout(checked_offsets(op, "k_offsets", heap, view, k_offsets),
                     checked_offsets(op, "v_offsets", heap, view, v_offsets),
                     view.block_size, view.head_dim);
}

// One (page, slot) per token, in range.
struct Tokens {
  const std::int64_t* pages;
  const std::int64_t* slots;
  std::int64_t n;
};

Tokens checked_tokens(const char* op, const char* pages_name,
                      const char* slots_name, const Tensor& heap,
                      const HeapView& view, const Tensor& pages,
                      const Tensor& slots, std::int64_t size) {
  const std::int64_t* page = Argument{op, pages_name, pages}.indices(heap, size);
  const std::int64_t n = pages.size(0);
  const std::int64_t* slot = Argument{op, slots_name, slots}.indices(heap, n);
  require_ok(op, pages_name, check_pages(page, n, view.num_pages),
             view.num_pages);
  require_ok(op, slots_name, check_slots(slot, n, view.block_size),
             view.block_size);
  return Tokens{page, slot, n};
}

// Checks that destinations differ and, if sources are given, that none of them
// is a destination. Cost: two bit operations per token; calloc leaves the parts
// of the bitmap that no destination touches unmapped.
void check_writes(const char* op, const HeapView& view, const Tokens& to,
                  const Tokens* from) {
  const PageSpan span = span_of(to.pages, to.n);
  const std::int64_t words = span.bitmap_words(view.block_size);
  if (words == 0) return;
  std::unique_ptr<std::uint64_t, decltype(&std::free)> bitmap(
      static_cast<std::uint64_t*>(std::calloc(static_cast<std::size_t>(words),
                                              sizeof(std::uint64_t))),
      &std::free);
  if (!bitmap) throw std::bad_alloc();
  require_ok(op, "destination",
             check_distinct(to.pages, to.slots, to.n, view.block_size, span,
                            bitmap.get()),
             view.block_size);
  if (from == nullptr) return;
  require_ok(op, "source",
             check_disjoint(from->pages, from->slots, from->n, view.block_size,
                            span, bitmap.get()),
             view.block_size);
}

std::tuple<Tensor, Tensor> gather_tokens_cpu(
    const Tensor& heap, const Tensor& pages, const Tensor& slots,
    const Tensor& k_offsets, const Tensor& v_offsets, std::int64_t block_size,
    bool /*natural*/) {
  const char* op = "gather_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout = checked_layout(op, heap, view, k_offsets, v_offsets);
  const Tokens from =
      checked_tokens(op, "pages", "slots", heap, view, pages, slots, -1);
  Tensor keys = torch::stable::new_empty(heap, {from.n, view.head_dim});
  Tensor values = torch::stable::new_empty(heap, {from.n, view.head_dim});
  with_element(view, [&](auto* tag) {
    gather_tokens(read(heap, tag), view.page_stride, from.pages, from.slots,
                  from.n, layout, write(keys, tag), write(values, tag));
  });
  return {keys, values};
}

void scatter_tokens_cpu(const Tensor& heap, const Tensor& pages,
                        const Tensor& slots, const Tensor& keys,
                        const Tensor& values, const Tensor& k_offsets,
                        const Tensor& v_offsets, std::int64_t block_size,
                        bool /*natural*/) {
  const char* op = "scatter_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout = checked_layout(op, heap, view, k_offsets, v_offsets);
  const Tokens to =
      checked_tokens(op, "pages", "slots", heap, view, pages, slots, -1);
  Argument{op, "keys", keys}.require_rows(heap, to.n, view.head_dim);
  Argument{op, "values", values}.require_rows(heap, to.n, view.head_dim);
  check_writes(op, view, to, nullptr);
  with_element(view, [&](auto* tag) {
    scatter_tokens(write(heap, tag), view.page_stride, to.pages, to.slots, to.n,
                   layout, read(keys, tag), read(values, tag));
  });
}

void move_tokens_cpu(const Tensor& heap, const Tensor& src_pages,
                     const Tensor& src_slots, const Tensor& dst_pages,
                     const Tensor& dst_slots, const Tensor& k_offsets,
                     const Tensor& v_offsets, std::int64_t block_size,
                     bool /*natural*/) {
  const char* op = "move_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout = checked_layout(op, heap, view, k_offsets, v_offsets);
  const Tokens from = checked_tokens(op, "src_pages", "src_slots", heap, view,
                                     src_pages, src_slots, -1);
  const Tokens to = checked_tokens(op, "dst_pages", "dst_slots", heap, view,
                                   dst_pages, dst_slots, from.n);
  check_writes(op, view, to, &from);
  with_element(view, [&](auto* tag) {
    move_tokens(write(heap, tag), view.page_stride, from.pages, from.slots,
                to.pages, to.slots, from.n, layout);
  });
}

Tensor gather_pages_cpu(const Tensor& heap, const Tensor& page_table,
                        const Tensor& offsets, std::int64_t block_size,
                        std::int64_t /*natural_base*/) {
  const char* op = "gather_pages";
  const HeapView view = view_heap(op, heap, block_size);
  const Plane plane =
      make_plane(checked_offsets(op, "offsets", heap, view, offsets),
                 view.block_size, view.head_dim);
  const std::int64_t* pages = Argument{op, "page_table", page_table}.table(heap);
  require_ok(op, "page_table",
             check_pages(pages, page_table.numel(), view.num_pages),
             view.num_pages);
  const std::int64_t rows = page_table.size(0);
  const std::int64_t per_row = page_table.size(1);
  Tensor out = torch::stable::new_empty(
      heap, {rows, per_row * view.block_size, view.head_dim});
  with_element(view, [&](auto* tag) {
    gather_plane(read(heap, tag), view.page_stride, pages, rows, per_row, plane,
                 view.block_size, view.head_dim, write(out, tag));
  });
  return out;
}

#define KVP_STRINGIZE_(x) #x
#define KVP_STRINGIZE(x) KVP_STRINGIZE_(x)

// "name=value" pairs separated by ';', for `kvplugins doctor`.
std::string build_info() {
  // ops_version counts changes of the schemas; ops/extension.py has the same.
  std::string info = "ops_version=3;build_type=" KVP_BUILD_TYPE
                     ";torch_headers=" KVP_TORCH_VERSION;
#ifdef KVP_WITH_CUDA
  info += ";cuda=1";
#else
  info += ";cuda=0";
#endif
#ifdef _OPENMP
  info += ";openmp=" KVP_STRINGIZE(_OPENMP);
#else
  info += ";openmp=0";
#endif
#ifdef __VERSION__
  info += ";compiler=" __VERSION__;
#endif
  return info;
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY(kvp, m) {
  m.def(
      "gather_tokens(Tensor heap, Tensor pages, Tensor slots, Tensor k_offsets, "
      "Tensor v_offsets, int block_size, bool natural=False) -> (Tensor, Tensor)");
  m.def(
      "scatter_tokens(Tensor(a!) heap, Tensor pages, Tensor slots, Tensor keys, "
      "Tensor values, Tensor k_offsets, Tensor v_offsets, int block_size, "
      "bool natural=False) -> ()");
  m.def(
      "move_tokens(Tensor(a!) heap, Tensor src_pages, Tensor src_slots, "
      "Tensor dst_pages, Tensor dst_slots, Tensor k_offsets, Tensor v_offsets, "
      "int block_size, bool natural=False) -> ()");
  m.def(
      "gather_pages(Tensor heap, Tensor page_table, Tensor offsets, "
      "int block_size, int natural_base=-1) -> Tensor");
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("gather_tokens", TORCH_BOX(&kvp::binding::gather_tokens_cpu));
  m.impl("scatter_tokens", TORCH_BOX(&kvp::binding::scatter_tokens_cpu));
  m.impl("move_tokens", TORCH_BOX(&kvp::binding::move_tokens_cpu));
  m.impl("gather_pages", TORCH_BOX(&kvp::binding::gather_pages_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&kvp::binding::build_info));
}
