// torch bindings of retrieval: select the tokens that the queries of a step attend to
// most, and copy those tokens into hot slots. One call per layer serves all requests.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "index_query.hpp"
#include "kvp/hot_set.hpp"

namespace kvp::binding {
namespace {

void require_scale(const char* op, double scale) {
  if (!(scale >= 0.0 && scale <= 1e18)) {
    fail(op, "scale must be at least 0 and finite, got ", scale);
  }
}

// int64 [requests, heads, count]: see Votes::best.
Tensor index_select(const Tensor& handles, const Tensor& queries, const Tensor& keys,
                    const Tensor& table, bool by_page, std::int64_t max_visits,
                    double visit_ratio, double scale, std::int64_t count) {
  const char* op = "index_select";
  const QueryCall call = checked_call(op, handles, queries, keys, table, by_page, count,
                                      max_visits, visit_ratio);
  require_scale(op, scale);
  Tensor chosen = call.output({call.heads, count}, ScalarType::Long);
  std::int64_t* out = chosen.mutable_data_ptr<std::int64_t>();
  for_all(call.tasks(), call.work_ns(), free_cores(), [&](std::int64_t task) {
    // Kept between calls: a decode step makes hundreds of them.
    static thread_local VoteScratch scratch;
    const AnyIndex& key_index =
        *call.indexes[static_cast<std::size_t>(task / call.heads)];
    const float* query = call.queries.data() + task * call.group * call.head_dim;
    key_index.vote(task % call.heads, call.views[static_cast<std::size_t>(task)],
                   call.by_page, query, call.group, static_cast<float>(scale),
                   call.options, scratch);
    scratch.votes.best(count, out + task * count);
  });
  return chosen;
}

// int64 [requests, heads, count]: see PageVotes::best. Keys lie in the order of pages.
Tensor index_select_pages(const Tensor& handles, const Tensor& queries,
                          const Tensor& keys, const Tensor& table,
                          std::int64_t max_visits, double scale, std::int64_t count) {
  const char* op = "index_select_pages";
  if (count < 1 || count > 0x7fffffff / 64) {
    fail(op, "count must be positive, got ", count);
  }
  const QueryCall call = checked_call(op, handles, queries, keys, table, false,
                                      count * index::kStoredKeys, max_visits, 1.0);
  require_scale(op, scale);
  for (const auto& key_index : call.indexes) {
    if (!key_index->has_ordered_pages()) fail(op, "a tree has no pages in order");
  }
  Tensor chosen = call.output({call.heads, count}, ScalarType::Long);
  std::int64_t* out = chosen.mutable_data_ptr<std::int64_t>();
  for_all(call.tasks(), call.work_ns(), free_cores(), [&](std::int64_t task) {
    static thread_local VoteScratch scratch;
    const AnyIndex& key_index =
        *call.indexes[static_cast<std::size_t>(task / call.heads)];
    const float* query = call.queries.data() + task * call.group * call.head_dim;
    key_index.vote_pages(task % call.heads, call.views[static_cast<std::size_t>(task)],
                         query, call.group, static_cast<float>(scale), call.options,
                         scratch);
    scratch.pages.best(count, out + task * count);
  });
  return chosen;
}

// Nanoseconds per wanted token, a quarter of which is not resident: to copy it from the
// host into transposed keys, and to list it only.
constexpr std::int64_t kCopyNs = 150, kListNs = 5;

// The hot slots of some requests and the tokens wanted in them, checked.
//
// A request's hot slots are entry slot_index[request] of `token`, `page`, `slot`
// [num_entries, heads, width] and `count` [num_entries]. With whole pages, `wanted` and
// `token` are entries of the table instead; `page` and `slot` are page_tokens times as wide.
struct HotCall {
  const char* op;
  const std::int64_t *table, *wanted, *slot_index, *count, *page, *slot;
  std::int64_t* token;
  std::int64_t requests, heads, num_wanted, width, num_entries, host_pages, page_tokens;
  bool whole_pages;

  std::int64_t tasks() const { return requests * heads; }
  // Tokens of a hot slot.
  std::int64_t unit() const { return whole_pages ? page_tokens : 1; }
  std::int64_t capacity() const { return host_pages * page_tokens / unit(); }
  std::int64_t work_ns(std::int64_t ns_per_wanted) const {
    return tasks() * num_wanted * unit() * ns_per_wanted;
  }
  const std::int64_t* pages(std::int64_t task) const {
    return table + task * host_pages;
  }

  HotSlots slots(std::int64_t task) const {
    const std::int64_t request = task / heads, entry = slot_index[request];
    if (entry < 0 || entry >= num_entries || count[entry] < 0 || count[entry] > width) {
      fail(op, "request ", request, " has slot index ", entry,
           ", which does not exist");
    }
    const std::int64_t first = (entry * heads + task % heads) * width;
    return {token + first, page + first * unit(), slot + first * unit(), count[entry],
            unit()};
  }

  // Calls swap(wanted, num_wanted, mark), which returns what swap_hot_slots does.
  template <typename Swap>
  std::int64_t run(std::int64_t task, const Swap& swap) const {
    static thread_local std::vector<std::uint8_t> mark;
    if (mark.size() < static_cast<std::size_t>(capacity())) {
      mark.resize(static_cast<std::size_t>(capacity()));
    }
    const std::int64_t done = swap(wanted + task * num_wanted, num_wanted, mark);
    if (done < 0) {
      fail(op, "request ", task / heads, ", head ", task % heads, ": entry ", -1 - done,
           " of wanted and hot ", whole_pages ? "pages" : "tokens", " is beyond the ",
           capacity(), whole_pages ? " pages" : " tokens", " of its table");
    }
    return done;
  }
};

HotCall checked_hot_call(const char* op, const Tensor& host, const Tensor& table,
                         const Tensor& wanted, const Tensor& slot_indices,
                         const Tensor& token, const Tensor& page, const Tensor& slot,
                         const Tensor& counts, bool whole_pages) {
  Argument{op, "host", host}.require_dim(4);
  Argument{op, "host", host}.require_contiguous();
  Argument{op, "wanted", wanted}.require_dim(3);
  Argument{op, "token", token}.require_dim(3);
  Argument{op, "table", table}.require_dim(3);
  if (!host.is_cpu() || host.size(1) != 2) {
    fail(op, "host must be [pages, 2, page_tokens, head_dim] on the CPU, got ",
         shape_of(host));
  }
  const std::int64_t requests = wanted.size(0), heads = wanted.size(1);
  const std::int64_t width = token.size(2), capacity = token.size(0);
  const auto require = [op](const char* name, const Tensor& tensor,
                            const std::vector<std::int64_t>& shape) {
    Argument{op, name, tensor}.require_type(ScalarType::Long);
    require_shape(op, name, tensor, shape);
  };
  require("wanted", wanted, {requests, heads, wanted.size(2)});
  require("slot_indices", slot_indices, {requests});
  require("table", table, {requests, heads, table.size(2)});
  require("token", token, {capacity, heads, width});
  const std::int64_t slots = width * (whole_pages ? host.size(2) : 1);
  require("page", page, {capacity, heads, slots});
  require("slot", slot, {capacity, heads, slots});
  require("counts", counts, {capacity});
  const std::int64_t* ids = table.const_data_ptr<std::int64_t>();
  const std::int64_t host_pages = host.size(0), entries = table.numel();
  for (std::int64_t i = 0; i < entries; ++i) {
    if (ids[i] < 0 || ids[i] >= host_pages) {
      fail(op, "table entry ", i, " is page ", ids[i], ", but host has pages 0 to ",
           host_pages - 1);
    }
  }
  return {op,
          ids,
          wanted.const_data_ptr<std::int64_t>(),
          slot_indices.const_data_ptr<std::int64_t>(),
          counts.const_data_ptr<std::int64_t>(),
          page.const_data_ptr<std::int64_t>(),
          slot.const_data_ptr<std::int64_t>(),
          token.mutable_data_ptr<std::int64_t>(),
          requests,
          heads,
          wanted.size(2),
          width,
          capacity,
          table.size(2),
          host.size(2),
          whole_pages};
}

// int64 [requests]: sums over heads.
Tensor per_request(const HotCall& call, const std::vector<std::int64_t>& per_task) {
  Tensor out = new_on_cpu({call.requests}, ScalarType::Long);
  std::int64_t* sums = out.mutable_data_ptr<std::int64_t>();
  std::fill_n(sums, call.requests, 0);
  for (std::int64_t task = 0; task < call.tasks(); ++task) {
    sums[task / call.heads] += per_task[static_cast<std::size_t>(task)];
  }
  return out;
}

// int64 [requests]: the number of tokens, or pages, copied.
Tensor fill_hot(const Tensor& heap, const Tensor& k_offsets, const Tensor& v_offsets,
                std::int64_t block_size, const Tensor& host, const Tensor& table,
                const Tensor& wanted, const Tensor& slot_indices, const Tensor& token,
                const Tensor& page, const Tensor& slot, const Tensor& counts,
                bool whole_pages) {
  const char* op = "fill_hot";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout =
      make_layout(Argument{op, "k_offsets", k_offsets}.offsets(heap, view.plane_elems),
                  Argument{op, "v_offsets", v_offsets}.offsets(heap, view.plane_elems),
                  view.block_size, view.head_dim);
  const HotCall call = checked_hot_call(op, host, table, wanted, slot_indices, token,
                                        page, slot, counts, whole_pages);
  // Rows of an fp8 heap are copied bit by bit.
  const bool quantized =
      host.scalar_type() == ScalarType::Byte && view.element_size > 1;
  QuantizedRows rows;
  if (quantized) {
    rows = quantized_rows_of(op, "host", host, view.head_dim);
    if (heap.scalar_type() == ScalarType::Half) {
      fail(op, "a float16 heap has no quantized host pages");
    }
  } else {
    Argument{op, "host", host}.require_type(heap.scalar_type());
    if (host.size(3) != view.head_dim) {
      fail(op, "host must be [pages, 2, page_tokens, ", view.head_dim, "], got ",
           shape_of(host));
    }
  }
  std::vector<std::int64_t> copied(static_cast<std::size_t>(call.tasks()));
  with_element(view, [&](auto* tag) {
    using Element = std::remove_pointer_t<decltype(tag)>;
    const auto kv = view.paged(write(heap, tag), layout);
    for_all(call.tasks(), call.work_ns(kCopyNs), free_cores(), [&](std::int64_t task) {
      const HotSlots hot = call.slots(task);
      for (std::int64_t i = 0; i < hot.n * hot.unit; ++i) {
        if (hot.page[i] < 0 || hot.page[i] >= view.num_pages || hot.slot[i] < 0 ||
            hot.slot[i] >= view.block_size) {
          fail(op, "hot slot ", i, " of request ", task / call.heads, " is slot ",
               hot.slot[i], " of page ", hot.page[i], ", which the heap does not have");
        }
      }
      const auto fill = [&](auto tokens) {
        copied[static_cast<std::size_t>(task)] = call.run(
            task, [&](const std::int64_t* own_wanted, std::int64_t n, auto& mark) {
              return fill_hot_slots(tokens, call.capacity(), own_wanted, n, hot, kv,
                                    mark);
            });
      };
      if constexpr (sizeof(Element) > 1) {
        if (quantized) {
          const HostTokens<std::uint8_t> bytes{
              static_cast<const std::uint8_t*>(host.const_data_ptr()), call.pages(task),
              call.page_tokens, rows.row_bytes()};
          fill(QuantizedTokens<Element>(bytes, rows));
          return;
        }
      }
      fill(HostTokens<Element>{read(host, tag), call.pages(task), call.page_tokens,
                               view.head_dim});
    });
  });
  return per_request(call, copied);
}

// Like fill_hot, for a heap on another device: updates `token` and returns the copies
// that the caller must make. int64 [4, n]: host rows of the keys and of the values, then
// their pages and slots in the heap; int64 [requests]: tokens, or pages, per request.
std::tuple<Tensor, Tensor> swap_hot(const Tensor& host, const Tensor& table,
                                    const Tensor& wanted, const Tensor& slot_indices,
                                    const Tensor& token, const Tensor& page,
                                    const Tensor& slot, const Tensor& counts,
                                    bool whole_pages) {
  const HotCall call = checked_hot_call("swap_hot", host, table, wanted, slot_indices,
                                        token, page, slot, counts, whole_pages);
  struct Move {
    std::int64_t row, page, slot;
  };
  const auto tasks = static_cast<std::size_t>(call.tasks());
  std::vector<std::vector<Move>> found(tasks);
  std::vector<std::int64_t> copied(tasks);
  for_all(call.tasks(), call.work_ns(kListNs), free_cores(), [&](std::int64_t task) {
    const auto i = static_cast<std::size_t>(task);
    const HotSlots hot = call.slots(task);
    const HostTokens<std::uint16_t> tokens{nullptr, call.pages(task), call.page_tokens,
                                           0};
    const auto note = [&](std::int64_t place, std::int64_t number) {
      for (std::int64_t k = 0; k < hot.unit; ++k) {
        const std::int64_t at = place * hot.unit + k;
        found[i].push_back(
            {tokens.row(number * hot.unit + k), hot.page[at], hot.slot[at]});
      }
    };
    copied[i] =
        call.run(task, [&](const std::int64_t* own_wanted, std::int64_t n, auto& mark) {
          return swap_hot_slots(call.capacity(), own_wanted, n, hot, mark, note);
        });
  });
  std::int64_t n = 0;
  for (const std::int64_t each : copied) n += each * call.unit();
  Tensor moves = new_on_cpu({4, n}, ScalarType::Long);
  std::int64_t* key = moves.mutable_data_ptr<std::int64_t>();
  std::int64_t *value = key + n, *page_of = value + n, *slot_of = page_of + n;
  for (const std::vector<Move>& part : found) {
    for (const Move& move : part) {
      *key++ = move.row;
      *value++ = move.row + call.page_tokens;
      *page_of++ = move.page;
      *slot_of++ = move.slot;
    }
  }
  return {moves, per_request(call, copied)};
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def(
      "index_select(Tensor handles, Tensor queries, Tensor keys, Tensor table, "
      "bool by_page, int max_visits, float visit_ratio, float scale, int count) "
      "-> Tensor");
  m.def(
      "index_select_pages(Tensor handles, Tensor queries, Tensor keys, Tensor table, "
      "int max_visits, float scale, int count) -> Tensor");
  m.def(
      "fill_hot(Tensor(a!) heap, Tensor k_offsets, Tensor v_offsets, "
      "int block_size, Tensor host, Tensor table, Tensor wanted, Tensor slot_indices, "
      "Tensor(b!) token, Tensor page, Tensor slot, Tensor counts, "
      "bool whole_pages=False) -> Tensor");
  m.def(
      "swap_hot(Tensor host, Tensor table, Tensor wanted, Tensor slot_indices, "
      "Tensor(a!) token, Tensor page, Tensor slot, Tensor counts, "
      "bool whole_pages=False) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("index_select", TORCH_BOX(&kvp::binding::index_select));
  m.impl("index_select_pages", TORCH_BOX(&kvp::binding::index_select_pages));
  m.impl("fill_hot", TORCH_BOX(&kvp::binding::fill_hot));
  m.impl("swap_hot", TORCH_BOX(&kvp::binding::swap_hot));
}
