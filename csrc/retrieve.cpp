// torch bindings of retrieval: which tokens the queries of a step want, and the
// copies that make them resident. One call per layer serves all its requests.
#include <torch/csrc/stable/library.h>

#include "index_question.hpp"
#include "kvp/hot_set.hpp"

namespace kvp::binding {
namespace {

// int64 [requests, heads, count]: see Votes::best.
Tensor index_select(const Tensor& handles, const Tensor& queries,
                    const Tensor& keys, const Tensor& table, bool by_page,
                    std::int64_t max_visits, double visit_ratio, double scale,
                    std::int64_t count) {
  const char* op = "index_select";
  const Question question = ask(op, handles, queries, keys, table, by_page, count,
                                max_visits, visit_ratio);
  if (!(scale >= 0.0 && scale <= 1e18)) {
    fail(op, "scale must be at least 0 and finite, got ", scale);
  }
  Tensor chosen =
      torch::stable::new_empty(handles, {queries.size(0), question.heads, count});
  std::int64_t* out = chosen.mutable_data_ptr<std::int64_t>();
  for_all(question.tasks(), [&](std::int64_t task) {
    // Kept from call to call: a decode step makes hundreds.
    static thread_local VoteScratch scratch;
    const AnyIndex& found =
        *question.indexes[static_cast<std::size_t>(task / question.heads)];
    const float* query =
        question.queries.data() + task * question.group * question.head_dim;
    found.vote(task % question.heads, question.views[static_cast<std::size_t>(task)],
               question.by_page, query, question.group, static_cast<float>(scale),
               question.options, scratch);
    scratch.votes.best(count, out + task * count);
  });
  return chosen;
}

// One axis of an int64 tensor that others must match.
void require_shape(const char* op, const char* name, const Tensor& tensor,
                   const std::vector<std::int64_t>& shape) {
  const Argument argument{op, name, tensor};
  argument.require_type(ScalarType::Long);
  argument.require_contiguous();
  bool same = tensor.is_cpu() &&
              tensor.dim() == static_cast<std::int64_t>(shape.size());
  for (std::size_t i = 0; same && i < shape.size(); ++i) {
    same = tensor.size(static_cast<std::int64_t>(i)) == shape[i];
  }
  if (same) return;
  std::ostringstream text;
  for (std::size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "") << shape[i];
  fail(op, name, " must be [", text.str(), "] on the CPU, got ", shape_of(tensor));
}

// int64 [requests]: tokens copied.
Tensor fill_hot(const Tensor& heap, const Tensor& k_offsets,
                const Tensor& v_offsets, std::int64_t block_size,
                const Tensor& host, const Tensor& table, const Tensor& wanted,
                const Tensor& seats, const Tensor& token, const Tensor& page,
                const Tensor& slot, const Tensor& counts) {
  const char* op = "fill_hot";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout = make_layout(
      Argument{op, "k_offsets", k_offsets}.offsets(heap, view.plane_elems),
      Argument{op, "v_offsets", v_offsets}.offsets(heap, view.plane_elems),
      view.block_size, view.head_dim);
  Argument{op, "host", host}.require_dim(4);
  Argument{op, "host", host}.require_type(heap.scalar_type());
  Argument{op, "host", host}.require_contiguous();
  Argument{op, "wanted", wanted}.require_dim(3);
  Argument{op, "token", token}.require_dim(3);
  Argument{op, "table", table}.require_dim(3);
  if (host.size(1) != 2 || host.size(3) != view.head_dim) {
    fail(op, "host must be [pages, 2, page_tokens, ", view.head_dim, "], got ",
         shape_of(host));
  }
  const std::int64_t requests = wanted.size(0), heads = wanted.size(1);
  const std::int64_t width = token.size(2), all_seats = token.size(0);
  const std::int64_t per_row = table.size(2);
  require_shape(op, "wanted", wanted, {requests, heads, wanted.size(2)});
  require_shape(op, "seats", seats, {requests});
  require_shape(op, "table", table, {requests, heads, per_row});
  require_shape(op, "token", token, {all_seats, heads, width});
  require_shape(op, "page", page, {all_seats, heads, width});
  require_shape(op, "slot", slot, {all_seats, heads, width});
  require_shape(op, "counts", counts, {all_seats});
  const std::int64_t* ids = table.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < table.numel(); ++i) {
    if (ids[i] < 0 || ids[i] >= host.size(0)) {
      fail(op, "table entry ", i, " is page ", ids[i], ", but host has pages 0 to ",
           host.size(0) - 1);
    }
  }
  const std::int64_t* seat = seats.const_data_ptr<std::int64_t>();
  const std::int64_t* count = counts.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> copied(static_cast<std::size_t>(requests * heads));
  with_element(view, [&](auto* tag) {
    for_all(requests * heads, [&](std::int64_t task) {
      static thread_local std::vector<std::uint8_t> mark;
      const std::int64_t request = task / heads, head = task % heads;
      const std::int64_t here = seat[request];
      if (here < 0 || here >= all_seats || count[here] < 0 || count[here] > width) {
        fail(op, "request ", request, " has seat ", here, ", which there is not");
      }
      HostTokens<std::remove_pointer_t<decltype(tag)>> tokens{
          read(host, tag), ids + task * per_row, host.size(2), view.head_dim,
          per_row * host.size(2)};
      const std::int64_t first = (here * heads + head) * width;
      HotSlots hot{token.mutable_data_ptr<std::int64_t>() + first,
                   page.const_data_ptr<std::int64_t>() + first,
                   slot.const_data_ptr<std::int64_t>() + first, count[here]};
      for (std::int64_t i = 0; i < hot.n; ++i) {
        if (hot.page[i] < 0 || hot.page[i] >= view.num_pages || hot.slot[i] < 0 ||
            hot.slot[i] >= view.block_size) {
          fail(op, "hot slot ", i, " of request ", request, " is slot ", hot.slot[i],
               " of page ", hot.page[i], ", which the heap does not have");
        }
      }
      if (mark.size() < static_cast<std::size_t>(tokens.capacity)) {
        mark.resize(static_cast<std::size_t>(tokens.capacity));
      }
      const std::int64_t done = fill_hot_slots(
          tokens, wanted.const_data_ptr<std::int64_t>() + task * wanted.size(2),
          wanted.size(2), hot, write(heap, tag), view.page_stride, layout, mark);
      if (done < 0) {
        fail(op, "request ", request, ", head ", head, ": entry ", -1 - done,
             " of wanted and hot tokens is beyond the ", tokens.capacity,
             " tokens of its table");
      }
      copied[static_cast<std::size_t>(task)] = done;
    });
  });
  Tensor out = torch::stable::new_empty(seats, {requests});
  std::int64_t* sums = out.mutable_data_ptr<std::int64_t>();
  for (std::int64_t r = 0; r < requests; ++r) {
    sums[r] = 0;
    for (std::int64_t h = 0; h < heads; ++h) {
      sums[r] += copied[static_cast<std::size_t>(r * heads + h)];
    }
  }
  return out;
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def(
      "index_select(Tensor handles, Tensor queries, Tensor keys, Tensor table, "
      "bool by_page, int max_visits, float visit_ratio, float scale, int count) "
      "-> Tensor");
  m.def(
      "fill_hot(Tensor(a!) heap, Tensor k_offsets, Tensor v_offsets, "
      "int block_size, Tensor host, Tensor table, Tensor wanted, Tensor seats, "
      "Tensor(b!) token, Tensor page, Tensor slot, Tensor counts) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("index_select", TORCH_BOX(&kvp::binding::index_select));
  m.impl("fill_hot", TORCH_BOX(&kvp::binding::fill_hot));
}
