// torch bindings of kvp/assign.hpp and kvp/irregularity.hpp. The CUDA version of the
// former is in assign.cu; the latter has none, torch runs instead.
#include "kvp/assign.hpp"
#include "kvp/for_all.hpp"

#include "kvp/irregularity.hpp"

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "assign_check.hpp"

namespace kvp::binding {
namespace {

// Slots without a token form a cluster of their own, with value 0.
void mark_absent(const float* values, const bool* valid, const AssignSizes& size,
                 std::int64_t* clusters, float* kept) {
  for (std::int64_t t = 0; t < size.slots; ++t) {
    const bool token = valid == nullptr || valid[t];
    kept[t] = token ? values[t] : 0.0f;
    if (!token) clusters[t] = size.prototypes;
  }
}

// Assigns the keys of all heads in one parallel region. Scratch: the packed prototypes.
template <typename Element>
void assign_heads(const Tensor& keys, const Tensor& prototypes, const AssignSizes& size,
                  std::int64_t* clusters) {
  const auto* first = static_cast<const Element*>(keys.const_data_ptr());
  const float* rows = prototypes.const_data_ptr<float>();
  const Simd simd = assign_simd<Element>();
  const std::int64_t panel_size = packed_size(simd, size.prototypes, size.head_dim);
  std::vector<float> panels(static_cast<std::size_t>(size.heads * panel_size));
  std::vector<std::int64_t> order(
      static_cast<std::size_t>(size.heads * size.prototypes));
  std::vector<Assignment<Element>> work;
  for (std::int64_t head = 0; head < size.heads; ++head) {
    float* panel = panels.data() + head * panel_size;
    std::int64_t* numbers = order.data() + head * size.prototypes;
    const std::int64_t packed =
        pack_prototypes(simd, rows + head * size.prototypes * size.head_dim,
                        size.prototypes, size.head_dim, panel, numbers);
    work.push_back({first + head * keys.stride(0), size.slots, keys.stride(1),
                    size.head_dim, panel, numbers, packed});
  }
  [[maybe_unused]] const Work total =
      Work::products(size.heads * size.slots * size.prototypes * size.head_dim);
#pragma omp parallel if (total.parallel())
  for (std::int64_t head = 0; head < size.heads; ++head) {
    assign_to_prototypes(simd, work[static_cast<std::size_t>(head)],
                         clusters + head * size.slots);
  }
}

std::tuple<Tensor, Tensor> assign_and_average_cpu(const Tensor& keys,
                                                  const Tensor& prototypes,
                                                  const Tensor& values,
                                                  std::optional<Tensor> valid) {
  const AssignSizes size = checked_assignment(keys, prototypes, values, valid);
  Tensor means = torch::stable::new_empty(values, {size.heads, size.slots});
  Tensor clusters =
      torch::stable::new_empty(values, {size.heads, size.slots}, ScalarType::Long);
  auto* found = clusters.mutable_data_ptr<std::int64_t>();
  switch (keys.scalar_type()) {
    case ScalarType::Float:
      assign_heads<float>(keys, prototypes, size, found);
      break;
    case ScalarType::Half:
      assign_heads<Float16>(keys, prototypes, size, found);
      break;
    case ScalarType::BFloat16:
      assign_heads<BFloat16>(keys, prototypes, size, found);
      break;
    default:
      fail(kAssign, "keys must be float32, float16 or bfloat16, got ",
           type_name(keys.scalar_type()));
  }
  const float* value = values.const_data_ptr<float>();
  const bool* token = valid ? valid->const_data_ptr<bool>() : nullptr;
  float* mean = means.mutable_data_ptr<float>();
  const auto table = static_cast<std::size_t>(size.prototypes + 1);
  std::vector<std::int64_t> sums(table), sizes(table);
  std::vector<float> of_cluster(table);
  for (std::int64_t head = 0; head < size.heads; ++head) {
    const std::int64_t at = head * size.slots;
    mark_absent(value + at, token ? token + at : nullptr, size, found + at, mean + at);
    cluster_mean(mean + at, found + at, size.slots, size.prototypes + 1, sums.data(),
                 sizes.data(), of_cluster.data(), mean + at);
  }
  return {means, clusters};
}

// The outputs of chunk_prototypes, of all heads.
struct Chunked {
  std::int64_t chunks, length, count;
  float* sums;
  std::int64_t* slots;
};

template <typename Element>
void chunk_heads(const Tensor& keys, const Chunked& out) {
  const auto* first = static_cast<const Element*>(keys.const_data_ptr());
  const std::int64_t heads = keys.size(0), n = out.chunks * out.length;
  const auto total = static_cast<std::size_t>(heads * n);
  std::vector<float> delta(total);
  std::vector<std::int64_t> order(total);
  const auto irregular = std::make_unique<bool[]>(total);
  const Simd simd = selected_simd(Simd::kAvx512);
  std::int64_t invalid_heads = 0;
  const auto chunks_of = [&](std::int64_t head) {
    return Chunks<Element>{first + head * keys.stride(0), out.chunks, out.length,
                           keys.stride(1), keys.size(2)};
  };
  [[maybe_unused]] const Work all = Work::products(8 * heads * n * keys.size(2));
#pragma omp parallel if (all.parallel())
  {
    for (std::int64_t head = 0; head < heads; ++head) {
      irregularity(simd, chunks_of(head), delta.data() + head * n,
                   out.sums + head * out.chunks * keys.size(2));
    }
#pragma omp barrier
#pragma omp for schedule(dynamic) reduction(+ : invalid_heads)
    for (std::int64_t head = 0; head < heads; ++head) {
      const float* own_delta = delta.data() + head * n;
      if (std::any_of(own_delta, own_delta + n,
                      [](float x) { return std::isnan(x); })) {
        ++invalid_heads;  // exceptions must not leave the parallel region
        continue;
      }
      bool* marks = irregular.get() + head * n;
      find_irregular(own_delta, n, out.count, order.data() + head * n, marks,
                     out.slots + head * out.count);
      sum_regular(chunks_of(head), marks, out.sums + head * out.chunks * keys.size(2));
    }
  }
  if (invalid_heads) fail("chunk_prototypes", "keys hold NaN or infinities");
}

std::tuple<Tensor, Tensor> chunk_prototypes_cpu(const Tensor& keys, std::int64_t chunks,
                                                std::int64_t count) {
  const char* op = "chunk_prototypes";
  Argument{op, "keys", keys}.require_dim(3);
  const std::int64_t heads = keys.size(0), head_dim = keys.size(2);
  if (chunks < 1 || chunks > keys.size(1)) {
    fail(op, "num_chunks must be 1 to the number of slots, ", keys.size(1), ", got ",
         chunks);
  }
  const std::int64_t length = keys.size(1) / chunks;
  if (count < 0 || count > chunks * length) {
    fail(op, "count must be 0 to ", chunks * length, ", got ", count);
  }
  if (head_dim > kMaxHeadDim) {
    fail(op, "head_dim must be at most ", kMaxHeadDim, ", got ", head_dim);
  }
  if (head_dim > 1 && keys.stride(2) != 1) {
    fail(op, "the elements of a key must lie side by side");
  }
  Tensor sums =
      torch::stable::new_empty(keys, {heads, chunks, head_dim}, ScalarType::Float);
  Tensor slots = torch::stable::new_empty(keys, {heads, count}, ScalarType::Long);
  const Chunked out{chunks, length, count, sums.mutable_data_ptr<float>(),
                    slots.mutable_data_ptr<std::int64_t>()};
  switch (keys.scalar_type()) {
    case ScalarType::Float:
      chunk_heads<float>(keys, out);
      break;
    case ScalarType::Half:
      chunk_heads<Float16>(keys, out);
      break;
    case ScalarType::BFloat16:
      chunk_heads<BFloat16>(keys, out);
      break;
    default:
      fail(op, "keys must be float32, float16 or bfloat16, got ",
           type_name(keys.scalar_type()));
  }
  return {sums, slots};
}

std::string simd_in_use() { return name_of(selected_simd()); }

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def(
      "assign_and_average(Tensor keys, Tensor prototypes, Tensor values, "
      "Tensor? valid) -> (Tensor, Tensor)");
  m.def(
      "chunk_prototypes(Tensor keys, int num_chunks, int count) "
      "-> (Tensor, Tensor)");
  m.def("simd_in_use() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("assign_and_average", TORCH_BOX(&kvp::binding::assign_and_average_cpu));
  m.impl("chunk_prototypes", TORCH_BOX(&kvp::binding::chunk_prototypes_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CompositeExplicitAutograd, m) {
  m.impl("simd_in_use", TORCH_BOX(&kvp::binding::simd_in_use));
}
