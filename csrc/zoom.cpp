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

// Who is seen and what belongs to whom, of all requests; [capacity].
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

// Their keys and values; [capacity, head_dim].
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

// [requests, 3]: first entry, spans and room of each, the same for all KV heads.
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
  const Regions made{argument.table(entries.like), regions.size(0), heads};
  if (regions.size(1) != 3) {
    fail(kOp, "regions must have 3 columns, got shape ", shape_of(regions));
  }
  if (heads < 1) fail(kOp, "heads must be positive, got ", heads);
  std::vector<std::pair<Index, Index>> runs;
  for (Index r = 0; r < made.requests; ++r) {
    const Index most = entries.capacity / heads;
    if (made.first(r) < 0 || made.spans(r) < 0 || made.room(r) < 0 ||
        made.spans(r) > most || made.room(r) > most || made.stride(r) > most ||
        made.first(r) > entries.capacity - heads * made.stride(r)) {
      fail(kOp, "regions[", r, "] is ", heads, " x (", made.spans(r), " + ",
           made.room(r), ") entries from ", made.first(r), ", but there are ",
           entries.capacity);
    }
    runs.emplace_back(made.first(r), made.first(r) + heads * made.stride(r));
  }
  std::sort(runs.begin(), runs.end());
  for (std::size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].first < runs[i - 1].second) {
      fail(kOp, "regions overlap at entry ", runs[i].first);
    }
  }
  return made;
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

// Row r * heads + h of request r, KV head h.
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

struct Making {
  std::size_t row, factors;
  Index matrix, first_slot;
  bool value;
};

// What is to be made of new spans, row by row; refuses records that are not sound.
std::vector<Making> list_makings(const std::vector<Row>& rows,
                                 const std::vector<Choice>& choices, Index heads,
                                 const std::vector<Factors>& factors) {
  std::vector<Making> list;
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
        list.push_back({i, request, matrix, slot, value});
      }
      slot += rows[i].sizes[span];
    }
  }
  return list;
}

// Makes the tokens of new spans where apply() has found room.
void make_tokens(const Planes& planes, const Entries& entries,
                 const std::vector<Row>& rows, const std::vector<Choice>& choices,
                 const std::vector<Making>& list, const std::vector<Factors>& factors) {
  const svd::Kernels& kernels = kvp::select_kernels<svd::Kernels>();
  Index work = 0;
  for (const Making& each : list) {
    const Factors& own = factors[each.factors];
    work += own.tokens[each.matrix] * own.ranks[each.matrix] * own.head_dim;
  }
  with_number(Argument{kOp, "keys", planes.keys}, [&](auto* tag) {
    using Element = std::remove_pointer_t<decltype(tag)>;
    for_all(
        static_cast<Index>(list.size()),
        [&](Index i) {
          static thread_local svd::Workspace room;
          const Making& each = list[static_cast<std::size_t>(i)];
          const Factors& own = factors[each.factors];
          const Tensor& plane = each.value ? planes.values : planes.keys;
          const Index at = rows[each.row].bias - entries.bias;
          Element* to =
              static_cast<Element*>(plane.mutable_data_ptr()) + at * planes.head_dim;
          with_number(Argument{kOp, own.name, own.tensor}, [&](auto* factor_tag) {
            using Factor = std::remove_pointer_t<decltype(factor_tag)>;
            zoom::make_entries(kernels, own.shape<Factor>(each.matrix),
                               own.record<Factor>(each.matrix),
                               choices[each.row].slots.data() + each.first_slot, to,
                               room);
          });
        },
        work >= kParallelWork);
  });
}

// The requests of a call and what their queries choose; changes nothing yet.
struct Question {
  std::vector<Row> rows;
  std::vector<Choice> choices;
  Index heads;
  bool parallel;

  template <typename Work>
  void for_rows(const Work& work) {
    for_all(
        static_cast<Index>(rows.size()),
        [&](Index i) {
          work(rows[static_cast<std::size_t>(i)], choices[static_cast<std::size_t>(i)]);
        },
        parallel);
  }

  std::int64_t shown() const {
    std::int64_t sum = 0;
    for (const Choice& choice : choices) sum += choice.shown;
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

Question ask(const Entries& entries, const Regions& places, const Tensor& gates,
             const Tensor& sizes, const Tensor& log_sizes) {
  Question question{
      checked_rows(entries, places, gates, sizes, log_sizes), {}, places.heads, false};
  question.choices.resize(question.rows.size());
  Index visited = 0;
  for (const Row& row : question.rows) visited += row.spans + row.room;
  question.parallel = visited >= zoom::kParallelEntries;
  question.for_rows([](const Row& row, Choice& choice) { zoom::choose(row, choice); });
  for (std::size_t i = 0; i < question.choices.size(); ++i) {
    if (question.choices[i].fits) continue;
    const auto row = static_cast<Index>(i);
    fail(kOp, "owner: request ", row / places.heads, ", head ", row % places.heads,
         " has more tokens than its bias says");
  }
  return question;
}

// (tokens made, tokens that are seen one by one), over all KV heads.
std::tuple<std::int64_t, std::int64_t> zoom_spans(
    const Tensor& keys, const Tensor& values, const Tensor& bias, const Tensor& owner,
    const Tensor& regions, std::int64_t heads, const Tensor& gates, const Tensor& sizes,
    const Tensor& log_sizes, std::vector<Tensor> factors, std::vector<Tensor> offsets,
    std::vector<Tensor> ranks, std::vector<Tensor> tokens) {
  const Planes planes = checked_planes(keys, values);
  const Entries entries = checked_entries(bias, owner, keys, keys.size(0));
  const Regions places = checked_regions(regions, heads, entries);
  const auto requests = static_cast<std::size_t>(places.requests);
  if (factors.size() != requests || offsets.size() != requests ||
      ranks.size() != requests || tokens.size() != requests) {
    fail(kOp, "factors must be of ", requests, " requests, got ", factors.size());
  }
  Question question = ask(entries, places, gates, sizes, log_sizes);
  std::vector<Factors> all;
  for (std::size_t r = 0; r < requests; ++r) {
    all.push_back(checked_factors(kOp, "factors", factors[r], offsets[r], ranks[r],
                                  tokens[r], planes.head_dim));
  }
  const std::vector<Making> list =
      list_makings(question.rows, question.choices, heads, all);
  question.for_rows([](const Row& row, Choice& choice) { zoom::apply(row, choice); });
  make_tokens(planes, entries, question.rows, question.choices, list, all);
  return {question.made(), question.shown()};
}

// What zoom_spans would make, for keys and values that are elsewhere. int64 [2, n]: the
// request of each new span and which of its spans it is, KV head by KV head; int64
// [tokens]: the entries of their tokens; and how many tokens are seen one by one. Bias
// and owner are those of the entries from now on.
std::tuple<Tensor, Tensor, std::int64_t> choose_spans(
    const Tensor& bias, const Tensor& owner, const Tensor& regions, std::int64_t heads,
    const Tensor& gates, const Tensor& sizes, const Tensor& log_sizes) {
  Argument{kOp, "bias", bias}.require_dim(1);
  const Entries entries = checked_entries(bias, owner, bias, bias.size(0));
  const Regions places = checked_regions(regions, heads, entries);
  Question question = ask(entries, places, gates, sizes, log_sizes);
  question.for_rows([](const Row& row, Choice& choice) { zoom::apply(row, choice); });
  std::int64_t n = 0;
  for (const Choice& choice : question.choices) {
    n += static_cast<std::int64_t>(choice.fresh.size());
  }
  Tensor fresh = torch::stable::new_empty(owner, {2, n});
  Tensor slots = torch::stable::new_empty(owner, {question.made()});
  std::int64_t* request = fresh.mutable_data_ptr<std::int64_t>();
  std::int64_t *matrix = request + n, *slot = slots.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < question.rows.size(); ++i) {
    const Row& row = question.rows[i];
    const auto number = static_cast<Index>(i);
    for (const Index span : question.choices[i].fresh) {
      *request++ = number / heads;
      *matrix++ = number % heads * row.spans + span;
    }
    for (const Index at : question.choices[i].slots) {
      *slot++ = row.bias - entries.bias + at;
    }
  }
  return {fresh, slots, question.shown()};
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
