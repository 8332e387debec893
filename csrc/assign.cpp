// torch bindings of kvp/assign.hpp and kvp/irregularity.hpp, CPU only; on CUDA
// Triton (vllm_kvplugins/ops/triton/clusters.py) and torch take their places.
#include "kvp/assign.hpp"

#include "kvp/irregularity.hpp"

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "binding.hpp"

namespace kvp::binding {
namespace {

constexpr const char* kOp = "assign_and_average";

struct Sizes {
  std::int64_t heads, slots, head_dim, prototypes;
};

void require_shape(const char* name, const Tensor& tensor,
                   const std::vector<std::int64_t>& shape) {
  bool same = tensor.dim() == static_cast<std::int64_t>(shape.size());
  for (std::size_t i = 0; same && i < shape.size(); ++i) {
    same = tensor.size(static_cast<std::int64_t>(i)) == shape[i];
  }
  if (same) return;
  std::ostringstream wanted;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    wanted << (i ? ", " : "") << shape[i];
  }
  fail(kOp, name, " must have shape [", wanted.str(), "], got ",
       shape_of(tensor));
}

Sizes checked(const Tensor& keys, const Tensor& prototypes,
              const Tensor& values, const std::optional<Tensor>& valid) {
  Argument{kOp, "keys", keys}.require_dim(3);
  const Argument rows{kOp, "prototypes", prototypes};
  rows.require_dim(3);
  const Sizes size{keys.size(0), keys.size(1), keys.size(2), prototypes.size(1)};
  require_shape("prototypes", prototypes,
                {size.heads, size.prototypes, size.head_dim});
  require_shape("values", values, {size.heads, size.slots});
  rows.require_type(ScalarType::Float);
  Argument{kOp, "values", values}.require_type(ScalarType::Float);
  if (size.prototypes == 0) fail(kOp, "there must be at least one prototype");
  if (size.head_dim > kMaxHeadDim) {
    fail(kOp, "head_dim must be at most ", kMaxHeadDim, ", got ", size.head_dim);
  }
  if (size.head_dim > 1 && size.slots > 0 && keys.stride(2) != 1) {
    fail(kOp, "the elements of a key must lie side by side");
  }
  rows.require_contiguous();
  Argument{kOp, "values", values}.require_contiguous();
  if (valid) {
    require_shape("valid", *valid, {size.heads, size.slots});
    Argument{kOp, "valid", *valid}.require_type(ScalarType::Bool);
    Argument{kOp, "valid", *valid}.require_contiguous();
  }
  return size;
}

// Assigns all heads. Scratch is one head's packed prototypes.
template <typename Element>
void assign_heads(const Tensor& keys, const Tensor& prototypes,
                  const Sizes& size, std::int64_t* clusters) {
  const auto* first = static_cast<const Element*>(keys.const_data_ptr());
  const float* rows = prototypes.const_data_ptr<float>();
  const Simd simd = best_simd();
  std::vector<float> panels(static_cast<std::size_t>(
      packed_size(simd, size.prototypes, size.head_dim)));
  std::vector<std::int64_t> order(static_cast<std::size_t>(size.prototypes));
  for (std::int64_t head = 0; head < size.heads; ++head) {
    const std::int64_t packed = pack_prototypes(
        simd, rows + head * size.prototypes * size.head_dim, size.prototypes,
        size.head_dim, panels.data(), order.data());
    assign_to_prototypes(
        simd,
        Assignment<Element>{first + head * keys.stride(0), size.slots,
                            keys.stride(1), size.head_dim, panels.data(),
                            order.data(), packed},
        clusters + head * size.slots);
  }
}

// Averages one head; what is no token forms a cluster of its own, of mean 0.
void average_head(const float* values, const bool* valid, const Sizes& size,
                  std::int64_t* clusters, std::int64_t* table, float* means) {
  const std::int64_t nobody = size.prototypes;
  for (std::int64_t t = 0; t < size.slots; ++t) {
    const bool token = valid == nullptr || valid[t];
    means[t] = token ? values[t] : 0.0f;
    if (!token) clusters[t] = nobody;
  }
  cluster_mean(means, clusters, size.slots, nobody + 1, table,
               table + nobody + 1, means);
}

std::tuple<Tensor, Tensor> assign_and_average_cpu(
    const Tensor& keys, const Tensor& prototypes, const Tensor& values,
    std::optional<Tensor> valid) {
  const Sizes size = checked(keys, prototypes, values, valid);
  Tensor means = torch::stable::new_empty(values, {size.heads, size.slots});
  Tensor clusters = torch::stable::new_empty(
      values, {size.heads, size.slots}, ScalarType::Long);
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
      fail(kOp, "keys must be float32, float16 or bfloat16, got ",
           torch::headeronly::toString(keys.scalar_type()));
  }
  const float* value = values.const_data_ptr<float>();
  const bool* token = valid ? valid->const_data_ptr<bool>() : nullptr;
  float* mean = means.mutable_data_ptr<float>();
  std::vector<std::int64_t> table(
      static_cast<std::size_t>(2 * (size.prototypes + 1)));
  for (std::int64_t head = 0; head < size.heads; ++head) {
    const std::int64_t at = head * size.slots;
    average_head(value + at, token ? token + at : nullptr, size, found + at,
                 table.data(), mean + at);
  }
  return {means, clusters};
}

// What chunk_prototypes works out for all heads.
struct Chunked {
  std::int64_t chunks, length, count;
  float* sums;
  std::int64_t* slots;
};

template <typename Element>
void chunk_heads(const Tensor& keys, const Chunked& out) {
  const auto* first = static_cast<const Element*>(keys.const_data_ptr());
  const std::int64_t n = out.chunks * out.length;
  const auto size = static_cast<std::size_t>(n);
  std::vector<float> delta(size);
  std::vector<std::int64_t> order(size);
  const auto irregular = std::make_unique<bool[]>(size);
  for (std::int64_t head = 0; head < keys.size(0); ++head) {
    const Chunks<Element> all{first + head * keys.stride(0), out.chunks,
                              out.length, keys.stride(1), keys.size(2)};
    irregularity(best_simd(), all, delta.data());
    for (float x : delta) {
      if (std::isnan(x)) fail("chunk_prototypes", "keys hold NaN or infinities");
    }
    find_irregular(delta.data(), n, out.count, order.data(), irregular.get(),
                   out.slots + head * out.count);
    sum_regular(all, irregular.get(),
                out.sums + head * out.chunks * all.head_dim);
  }
}

std::tuple<Tensor, Tensor> chunk_prototypes_cpu(const Tensor& keys,
                                                std::int64_t chunks,
                                                std::int64_t count) {
  const char* op = "chunk_prototypes";
  Argument{op, "keys", keys}.require_dim(3);
  const std::int64_t heads = keys.size(0), head_dim = keys.size(2);
  if (chunks < 1 || chunks > keys.size(1)) {
    fail(op, "num_chunks must be 1 to the number of slots, ", keys.size(1),
         ", got ", chunks);
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
  Tensor sums = torch::stable::new_empty(keys, {heads, chunks, head_dim},
                                         ScalarType::Float);
  Tensor slots =
      torch::stable::new_empty(keys, {heads, count}, ScalarType::Long);
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
           torch::headeronly::toString(keys.scalar_type()));
  }
  return {sums, slots};
}

std::string simd_in_use() {
  const Simd simd = best_simd();
  return simd == Simd::kAvx512 ? "avx512" : simd == Simd::kAvx2 ? "avx2" : "baseline";
}

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
