// torch binding of kvp/zoom.hpp, CPU only.
#include "kvp/zoom.hpp"

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <vector>

#include "factor_check.hpp"
#include "kvp/for_all.hpp"
#include "kvp/svd.hpp"

namespace kvp::binding {
namespace {

constexpr const char* kOp = "zoom_spans";

using zoom::Choice;
using zoom::Row;

// Bias and owner of every entry, of all requests; [capacity]. kvp/zoom.hpp explains
// them. Other tensors must be on the device of `like`.
struct Entries {
  const Tensor& like;
  float* bias;
  Index* owner;
  Index capacity;
};

Entries checked_entries(const Tensor& bias, const Tensor& owner, const Tensor& like,
                        Index capacity) {
  const Argument argument{kOp, "bias", bias};
  if (!bias.is_cpu()) fail(kOp, "bias must be on the CPU");
  argument.require_device_of(like);
  argument.require_dim(1);
  argument.require_type(ScalarType::Float);
  argument.require_contiguous();
  if (bias.size(0) != capacity) {
    fail(kOp, "bias must have ", capacity, " entries, got ", bias.size(0));
  }
  Argument{kOp, "owner", owner}.indices(like, capacity);
  return {like, bias.mutable_data_ptr<float>(), owner.mutable_data_ptr<std::int64_t>(),
          capacity};
}

// Keys and values of all entries; [capacity, head_dim].
struct Planes {
  const Tensor& keys;
  const Tensor& values;
  Index head_dim;
};

Planes checked_planes(const Tensor& keys, const Tensor& values) {
  const Argument key_argument{kOp, "keys", keys}, value_argument{kOp, "values", values};
  key_argument.require_dim(2);
  key_argument.require_contiguous();
  if (!keys.is_cpu()) fail(kOp, "keys must be on the CPU");
  with_number(key_argument, [](auto*) {});
  value_argument.require_rows(keys, keys.size(0), keys.size(1));
  return {keys, values, keys.size(1)};
}

// [requests, 3]: first entry, number of spans, and room for tokens of each request. All
// its KV heads have the same number of spans and the same room.
struct Regions {
  const Index* table;
  Index requests, heads;

  Index first(Index r) const { return table[3 * r]; }
  Index spans(Index r) const { return table[3 * r + 1]; }
  Index room(Index r) const { return table[3 * r + 2]; }
  Index stride(Index r) const { return spans(r) + room(r); }
};

Regions checked_regions(const Tensor& regions, Index heads, const Entries& entries) {
  const Argument argument{kOp, "regions", regions};
  const Regions checked{argument.table(entries.like), regions.size(0), heads};
  if (regions.size(1) != 3) {
    fail(kOp, "regions must have 3 columns, got shape ", shape_of(regions));
  }
  if (heads < 1) fail(kOp, "heads must be positive, got ", heads);
  std::vector<std::pair<Index, Index>> runs;
  for (Index r = 0; r < checked.requests; ++r) {
    const Index per_head = entries.capacity / heads;
    if (checked.first(r) < 0 || checked.spans(r) < 0 || checked.room(r) < 0 ||
        checked.spans(r) > per_head || checked.room(r) > per_head ||
        checked.stride(r) > per_head ||
        checked.first(r) > entries.capacity - heads * checked.stride(r)) {
      fail(kOp, "regions[", r, "] is ", heads, " x (", checked.spans(r), " + ",
           checked.room(r), ") entries from ", checked.first(r), ", but there are ",
           entries.capacity);
    }
    runs.emplace_back(checked.first(r), checked.first(r) + heads * checked.stride(r));
  }
  std::sort(runs.begin(), runs.end());
  for (std::size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].first < runs[i - 1].second) {
      fail(kOp, "regions overlap at entry ", runs[i].first);
    }
  }
  return checked;
}

template <typename T>
const T* spans_vector(const char* name, const Tensor& tensor, const Tensor& like,
                      ScalarType type, Index size) {
  const Argument argument{kOp, name, tensor};
  argument.require_device_of(like);
  argument.require_dim(1);
  argument.require_type(type);
  argument.require_contiguous();
  if (tensor.size(0) != size) {
    fail(kOp, name, " must have ", size, " entries, got ", tensor.size(0));
  }
  return tensor.const_data_ptr<T>();
}

// Row r * heads + h is KV head h of request r.
std::vector<Row> checked_rows(const Entries& entries, const Regions& regions,
                              const Tensor& gates, const Tensor& sizes,
                              const Tensor& log_sizes) {
  Index spans = 0;
  for (Index r = 0; r < regions.requests; ++r) spans += regions.spans(r);
  const float* gate = spans_vector<float>("gates", gates, entries.like,
                                          ScalarType::Float, regions.heads * spans);
  const Index* size =
      spans_vector<std::int64_t>("sizes", sizes, entries.like, ScalarType::Long, spans);
  const float* log_size = spans_vector<float>("log_sizes", log_sizes, entries.like,
                                              ScalarType::Float, spans);
  for (Index s = 0; s < spans; ++s) {
    if (size[s] < 1) fail(kOp, "sizes[", s, "] must be positive, got ", size[s]);
  }
  std::vector<Row> rows;
  for (Index r = 0; r < regions.requests; ++r) {
    const Index count = regions.spans(r), room = regions.room(r);
    for (Index h = 0; h < regions.heads; ++h) {
      const Index at = regions.first(r) + h * regions.stride(r);
      rows.push_back(
          {gate, size, log_size, count, room, entries.bias + at, entries.owner + at});
      for (Index e = count; e < count + room; ++e) {
        const Index owner = rows.back().owner[e];
        if (owner < -1 || owner >= count) {
          fail(kOp, "owner[", at + e, "] is span ", owner, ", but there are 0 to ",
               count - 1);
        }
      }
      gate += count;
    }
    size += count;
    log_size += count;
  }
  return rows;
}

// One matrix to reconstruct: the keys or the values of a new span.
struct Reconstruction {
  std::size_t row, request;
  Index matrix;
  Index first_slot;  // of the row's Choice::slots
  bool value;
};

// The reconstructions of all new spans, row by row. Checks their records.
std::vector<Reconstruction> list_reconstructions(const std::vector<Row>& rows,
                                                 const std::vector<Choice>& choices,
                                                 Index heads,
                                                 const std::vector<Factors>& factors) {
  std::vector<Reconstruction> reconstructions;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t request = i / static_cast<std::size_t>(heads);
    const Index head = static_cast<Index>(i) % heads, spans = rows[i].spans;
    const Factors& own = factors[request];
    Index slot = 0;
    for (const Index span : choices[i].fresh) {
      if (own.matrices != 2 * heads * spans) {
        fail(kOp, "factors[", request, "] must be of ", 2 * heads * spans,
             " matrices, got ", own.matrices);
      }
      for (const bool value : {false, true}) {
        const Index matrix = head * spans + span + (value ? heads * spans : 0);
        own.require_record(kOp, matrix);
        if (own.tokens[matrix] != rows[i].sizes[span]) {
          fail(kOp, "factors[", request, "]: matrix ", matrix, " must have ",
               rows[i].sizes[span], " tokens, got ", own.tokens[matrix]);
        }
        reconstructions.push_back({i, request, matrix, slot, value});
      }
      slot += rows[i].sizes[span];
    }
  }
  return reconstructions;
}

// Reconstructs the tokens of new spans into the entries that apply() took for them.
void reconstruct_tokens(const Planes& planes, const Entries& entries,
                        const std::vector<Row>& rows,
                        const std::vector<Choice>& choices,
                        const std::vector<Reconstruction>& reconstructions,
                        const std::vector<Factors>& factors) {
  const svd::Kernels& kernels = kvp::select_kernels<svd::Kernels>();
  Index products = 0;
  for (const Reconstruction& each : reconstructions) {
    products += factors[each.request].work(each.matrix);
  }
  with_number(Argument{kOp, "keys", planes.keys}, [&](auto* tag) {
    using Element = std::remove_pointer_t<decltype(tag)>;
    for_all(static_cast<Index>(reconstructions.size()), Work::products(products),
            [&](Index i) {
              static thread_local svd::Workspace work_buffers;
              const Reconstruction& each = reconstructions[static_cast<std::size_t>(i)];
              const Factors& own = factors[each.request];
              const Tensor& plane = each.value ? planes.values : planes.keys;
              const Index at = rows[each.row].bias - entries.bias;
              Element* to = static_cast<Element*>(plane.mutable_data_ptr()) +
                            at * planes.head_dim;
              with_number(Argument{kOp, own.name, own.tensor}, [&](auto* factor_tag) {
                using Factor = std::remove_pointer_t<decltype(factor_tag)>;
                zoom::reconstruct_entries(
                    kernels, own.shape<Factor>(each.matrix),
                    own.record<Factor>(each.matrix),
                    choices[each.row].slots.data() + each.first_slot, to, work_buffers);
              });
            });
  });
}

// The rows of a call and the spans that their queries choose. Nothing is written yet.
struct ZoomCall {
  std::vector<Row> rows;
  std::vector<Choice> choices;
  Index heads;
  Work work;

  template <typename Visit>
  void for_rows(const Visit& visit) {
    for_all(static_cast<Index>(rows.size()), work, [&](Index i) {
      visit(rows[static_cast<std::size_t>(i)], choices[static_cast<std::size_t>(i)]);
    });
  }

  std::int64_t zoomed_tokens() const {
    std::int64_t sum = 0;
    for (const Choice& choice : choices) sum += choice.zoomed_tokens;
    return sum;
  }

  std::int64_t made() const {
    std::int64_t sum = 0;
    for (const Choice& choice : choices) {
      sum += static_cast<std::int64_t>(choice.slots.size());
    }
    return sum;
  }
};

ZoomCall choose_all(const Entries& entries, const Regions& entry_regions,
                    const Tensor& gates, const Tensor& sizes, const Tensor& log_sizes) {
  ZoomCall call{checked_rows(entries, entry_regions, gates, sizes, log_sizes),
                {},
                entry_regions.heads,
                {0, zoom::kParallelEntries}};
  call.choices.resize(call.rows.size());
  for (const Row& row : call.rows) call.work.amount += row.spans + row.room;
  call.for_rows([](const Row& row, Choice& choice) { zoom::choose(row, choice); });
  for (std::size_t i = 0; i < call.choices.size(); ++i) {
    if (call.choices[i].fits) continue;
    const auto row = static_cast<Index>(i);
    fail(kOp, "owner: request ", row / entry_regions.heads, ", head ",
         row % entry_regions.heads, " has more tokens than its bias says");
  }
  return call;
}

// (reconstructed tokens, zoomed tokens), over all KV heads.
std::tuple<std::int64_t, std::int64_t> zoom_spans(
    const Tensor& keys, const Tensor& values, const Tensor& bias, const Tensor& owner,
    const Tensor& regions, std::int64_t heads, const Tensor& gates, const Tensor& sizes,
    const Tensor& log_sizes, std::vector<Tensor> factors, std::vector<Tensor> offsets,
    std::vector<Tensor> ranks, std::vector<Tensor> tokens) {
  const Planes planes = checked_planes(keys, values);
  const Entries entries = checked_entries(bias, owner, keys, keys.size(0));
  const Regions entry_regions = checked_regions(regions, heads, entries);
  const auto requests = static_cast<std::size_t>(entry_regions.requests);
  if (factors.size() != requests || offsets.size() != requests ||
      ranks.size() != requests || tokens.size() != requests) {
    fail(kOp, "factors must be of ", requests, " requests, got ", factors.size());
  }
  ZoomCall call = choose_all(entries, entry_regions, gates, sizes, log_sizes);
  std::vector<Factors> all;
  for (std::size_t r = 0; r < requests; ++r) {
    all.push_back(checked_factors(kOp, "factors", factors[r], offsets[r], ranks[r],
                                  tokens[r], planes.head_dim));
  }
  const std::vector<Reconstruction> reconstructions =
      list_reconstructions(call.rows, call.choices, heads, all);
  call.for_rows([](const Row& row, Choice& choice) { zoom::apply(row, choice); });
  reconstruct_tokens(planes, entries, call.rows, call.choices, reconstructions, all);
  return {call.made(), call.zoomed_tokens()};
}

// zoom_spans without the reconstruction, for keys and values on another device. Updates
// bias and owner. int64 [2, n]: request and number of each new span, KV head by KV head;
// int64 [tokens]: the entries of their tokens; and the number of zoomed tokens.
std::tuple<Tensor, Tensor, std::int64_t> choose_spans(
    const Tensor& bias, const Tensor& owner, const Tensor& regions, std::int64_t heads,
    const Tensor& gates, const Tensor& sizes, const Tensor& log_sizes) {
  Argument{kOp, "bias", bias}.require_dim(1);
  const Entries entries = checked_entries(bias, owner, bias, bias.size(0));
  const Regions entry_regions = checked_regions(regions, heads, entries);
  ZoomCall call = choose_all(entries, entry_regions, gates, sizes, log_sizes);
  call.for_rows([](const Row& row, Choice& choice) { zoom::apply(row, choice); });
  std::int64_t n = 0;
  for (const Choice& choice : call.choices) {
    n += static_cast<std::int64_t>(choice.fresh.size());
  }
  Tensor fresh = torch::stable::new_empty(owner, {2, n});
  Tensor slots = torch::stable::new_empty(owner, {call.made()});
  std::int64_t* request = fresh.mutable_data_ptr<std::int64_t>();
  std::int64_t *matrix = request + n, *slot = slots.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < call.rows.size(); ++i) {
    const Row& row = call.rows[i];
    const auto number = static_cast<Index>(i);
    for (const Index span : call.choices[i].fresh) {
      *request++ = number / heads;
      *matrix++ = number % heads * row.spans + span;
    }
    for (const Index at : call.choices[i].slots) {
      *slot++ = row.bias - entries.bias + at;
    }
  }
  return {fresh, slots, call.zoomed_tokens()};
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def(
      "zoom_spans(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) bias, "
      "Tensor(d!) owner, Tensor regions, int heads, Tensor gates, Tensor sizes, "
      "Tensor log_sizes, Tensor[] factors, Tensor[] offsets, Tensor[] ranks, "
      "Tensor[] tokens) -> (int, int)");
  m.def(
      "choose_spans(Tensor(a!) bias, Tensor(b!) owner, Tensor regions, int heads, "
      "Tensor gates, Tensor sizes, Tensor log_sizes) -> (Tensor, Tensor, int)");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("zoom_spans", TORCH_BOX(&kvp::binding::zoom_spans));
  m.impl("choose_spans", TORCH_BOX(&kvp::binding::choose_spans));
}
