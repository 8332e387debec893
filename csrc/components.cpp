// torch binding of kvp::svd::keep_components, CPU only.
#include <tuple>
#include <type_traits>

#include "factor_check.hpp"
#include "kvp/for_all.hpp"
#include "kvp/svd.hpp"

namespace kvp::binding {
namespace {

constexpr const char* kOp = "keep_components";

// Where the gates of each matrix begin; the last entry is their number.
std::vector<Index> gate_offsets(const Factors& factors, const Tensor& gates) {
  std::vector<Index> offsets{0};
  for (Index i = 0; i < factors.matrices; ++i) {
    factors.require_record(kOp, i);
    offsets.push_back(offsets.back() + factors.shape<float>(i).components());
  }
  const Argument argument{kOp, "gates", gates};
  argument.require_device_of(factors.tensor);
  argument.require_dim(1);
  argument.require_type(ScalarType::Float);
  argument.require_contiguous();
  if (gates.size(0) != offsets.back()) {
    fail(kOp, "gates must have ", offsets.back(), " entries, got ", gates.size(0));
  }
  const float* gate = gates.const_data_ptr<float>();
  for (Index i = 0; i < offsets.back(); ++i) {
    if (!(gate[i] >= 0.0f && gate[i] <= 1.0f)) {
      fail(kOp, "gates[", i, "] must be 0 to 1, got ", gate[i]);
    }
  }
  return offsets;
}

// (factors [elements], offsets int64 [matrices + 1], ranks int64 [matrices])
std::tuple<Tensor, Tensor, Tensor> keep_components(
    const Tensor& factors, const Tensor& offsets, const Tensor& ranks,
    const Tensor& tokens, std::int64_t head_dim, const Tensor& gates, double min_gate) {
  const Factors given =
      checked_factors(kOp, "factors", factors, offsets, ranks, tokens, head_dim);
  if (!(min_gate >= 0.0 && min_gate <= 1.0))
    fail(kOp, "min_gate must be 0 to 1, got ", min_gate);
  const std::vector<Index> first = gate_offsets(given, gates);
  const float* gate = gates.const_data_ptr<float>();
  const auto limit = static_cast<float>(min_gate);
  Tensor new_ranks = torch::stable::new_empty(ranks, {given.matrices});
  Tensor new_offsets = torch::stable::new_empty(ranks, {given.matrices + 1});
  auto* rank = new_ranks.mutable_data_ptr<std::int64_t>();
  auto* offset = new_offsets.mutable_data_ptr<std::int64_t>();
  Tensor kept = factors;  // Tensor has no default constructor
  with_number(Argument{kOp, "factors", factors}, [&](auto* tag) {
    using Factor = std::remove_pointer_t<decltype(tag)>;
    offset[0] = 0;
    for (Index i = 0; i < given.matrices; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const bool holds_rows = given.shape<Factor>(i).holds_rows();
      rank[i] = holds_rows
                    ? svd::kRows
                    : std::count_if(gate + first[at], gate + first[at + 1],
                                    [&](float g) { return svd::is_kept(g, limit); });
      const svd::Record<Factor> shape{given.tokens[i], head_dim, rank[i]};
      offset[i + 1] = offset[i] + shape.elements();
    }
    kept = torch::stable::new_empty(factors, {offset[given.matrices]});
    auto* to = static_cast<Factor*>(kept.mutable_data_ptr());
    for_all(given.matrices,
            Work::bytes(offset[given.matrices] * static_cast<Index>(sizeof(Factor))),
            [&](Index i) {
              svd::keep_components(given.shape<Factor>(i), given.record<Factor>(i),
                                   gate + first[static_cast<std::size_t>(i)], limit,
                                   to + offset[i]);
            });
  });
  return {kept, new_offsets, new_ranks};
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def(
      "keep_components(Tensor factors, Tensor offsets, Tensor ranks, Tensor tokens, "
      "int head_dim, Tensor gates, float min_gate) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("keep_components", TORCH_BOX(&kvp::binding::keep_components));
}
