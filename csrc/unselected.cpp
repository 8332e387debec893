// torch binding of kvp/unselected.hpp, CPU only.
#include "kvp/unselected.hpp"

#include <vector>

#include "kvp/paged_decode_check.hpp"
#include "token_check.hpp"

namespace kvp::binding {
namespace {

constexpr const char* kOp = "unselected_bias";

// Writes the biases of the entries of some requests. token: int64 [slot indices, heads,
// width]; slot_indices, counts: int64 [requests]; starts, chunks: int64 [requests *
// heads], the run of entries of each KV head; logs: float32 [chunk_tokens + 1].
void unselected_bias(const Tensor& bias, const Tensor& token,
                     const Tensor& slot_indices, const Tensor& counts,
                     const Tensor& starts, const Tensor& chunks, const Tensor& logs) {
  const Argument entries{kOp, "bias", bias}, hot{kOp, "token", token};
  if (!bias.is_cpu()) fail(kOp, "bias must be on the CPU");
  entries.require_dim(1);
  entries.require_type(ScalarType::Float);
  entries.require_contiguous();
  hot.require_device_of(bias, "bias");
  hot.require_dim(3);
  hot.require_type(ScalarType::Long);
  hot.require_contiguous();
  const std::int64_t requests = slot_indices.dim() == 1 ? slot_indices.size(0) : -1;
  const std::int64_t heads = token.size(1), width = token.size(2);
  const std::int64_t* slot =
      Argument{kOp, "slot_indices", slot_indices}.indices(bias, requests);
  const std::int64_t* count = Argument{kOp, "counts", counts}.indices(bias, requests);
  const std::int64_t runs = requests * heads;
  const std::int64_t* start = Argument{kOp, "starts", starts}.indices(bias, runs);
  const std::int64_t* number = Argument{kOp, "chunks", chunks}.indices(bias, runs);
  const Argument table{kOp, "logs", logs};
  table.require_device_of(bias, "bias");
  table.require_dim(1);
  table.require_type(ScalarType::Float);
  table.require_contiguous();
  if (logs.size(0) < 2) fail(kOp, "logs must have 2 entries or more");
  require_ok(kOp, "starts", check_runs(start, number, runs, bias.size(0)),
             bias.size(0));
  for (std::int64_t r = 0; r < requests; ++r) {
    if (slot[r] < 0 || slot[r] >= token.size(0)) {
      fail(kOp, "slot_indices[", r, "] is ", slot[r], ", but there are ",
           token.size(0));
    }
    if (count[r] < 0 || count[r] > width) {
      fail(kOp, "counts[", r, "] is ", count[r], ", but there are ", width,
           " tokens per KV head");
    }
  }
  std::vector<std::int64_t> left;
  for (std::int64_t run = 0; run < runs; ++run) {
    const std::int64_t r = run / heads;
    const SelectedTokens selected{
        token.const_data_ptr<std::int64_t>() + (slot[r] * heads + run % heads) * width,
        count[r]};
    const ChunkEntries own{bias.mutable_data_ptr<float>() + start[run], number[run],
                           logs.size(0) - 1, logs.const_data_ptr<float>()};
    if (!write_unselected(selected, own, left)) {
      fail(kOp, "token must be distinct and not negative in KV head ", run % heads,
           " of request ", r);
    }
  }
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def(
      "unselected_bias(Tensor(a!) bias, Tensor token, Tensor slot_indices, "
      "Tensor counts, Tensor starts, Tensor chunks, Tensor logs) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("unselected_bias", TORCH_BOX(&kvp::binding::unselected_bias));
}
