// torch bindings of the key index: the DCI-tree and the exact scan.
//
// An index is a handle (an integer) that Python owns and destroys. Queries of one index
// may run in parallel; an append runs alone. vllm_kvplugins/index/dci.py documents every
// argument.
//
// torch releases the GIL around ops that are called through torch.ops
// (tests/unit/test_index_threads.py checks that), so this file does not.
#include <torch/csrc/stable/library.h>

#include <limits>
#include <tuple>

#include "index_query.hpp"

namespace kvp::binding {
namespace {

std::int64_t index_create(std::int64_t kind, std::int64_t num_heads,
                          std::int64_t head_dim, std::int64_t page_size,
                          double promotion, std::int64_t composite, std::int64_t simple,
                          std::int64_t seed, bool by_mean, std::int64_t segment,
                          std::int64_t flat_keys, bool stores_pages) {
  const char* op = "index_create";
  const auto require = [op](const char* name, std::int64_t value, std::int64_t low,
                            std::int64_t high) {
    if (value < low || value > high) {
      fail(op, name, " must be ", low, " to ", high, ", got ", value);
    }
  };
  require("kind", kind, 0, 2);
  require("num_heads", num_heads, 1, 4096);
  require("head_dim", head_dim, 1, 4096);
  require("page_size", page_size, 1, 65536);
  require("composite", composite, 0, 16);
  require("simple", simple, 0, 16);
  if (!(promotion > 0.0 && promotion <= 0.5)) {
    fail(op, "promotion must be above 0 and at most 0.5, got ", promotion);
  }
  require("segment", segment, index::kCodeBlock, 1 << 16);
  if (segment % index::kCodeBlock != 0) {
    fail(op, "segment must be a multiple of ", index::kCodeBlock, ", got ", segment);
  }
  require("flat_keys", flat_keys, 0, std::int64_t{1} << 40);
  const Settings settings{head_dim,    page_size, promotion,
                          composite,   simple,    static_cast<std::uint64_t>(seed),
                          by_mean,     segment,   flat_keys,
                          stores_pages};
  if (kind == 0) {
    return Registry::get().add(
        std::make_shared<OneIndex<index::DciTree>>(settings, num_heads));
  }
  if (kind == 1) {
    return Registry::get().add(
        std::make_shared<OneIndex<index::BruteForce>>(settings, num_heads));
  }
  return Registry::get().add(
      std::make_shared<OneIndex<index::CodeIndex>>(settings, num_heads));
}

void index_destroy(std::int64_t handle) {
  if (!Registry::get().remove(handle)) {
    fail("index_destroy", "there is no index ", handle);
  }
}

void index_append(std::int64_t handle, const Tensor& keys, const Tensor& table,
                  std::int64_t count) {
  const char* op = "index_append";
  const std::shared_ptr<AnyIndex> key_index = Registry::get().find(op, handle);
  const std::unique_lock<std::shared_mutex> lock(key_index->mutex);
  require_usable(op, *key_index);
  const std::vector<KeyView> views = view_keys(
      op, keys, table, 1, key_index->num_heads(), key_index->settings().head_dim);
  if (count < 0 || count > views.front().num_places) {
    fail(op, "count is ", count, ", but keys has ", views.front().num_places,
         " slots per head");
  }
  if (key_index->num_keys() + count > 0x7fffffff / 2) {
    fail(op, "an index holds at most ", 0x7fffffff / 2, " keys per head");
  }
  key_index->broken = true;
  const BadKey bad = key_index->append(views, count);
  key_index->broken = false;
  if (bad.head >= 0) {
    fail(op, "key ", bad.slot, " of head ", bad.head,
         " is not finite, or its norm exceeds 1e18; nothing was added");
  }
}

// Runs every query of every (request, head). Calls take(row, best, visits)
// with the best keys of each query, and done(task, index, head) after those of a head.
template <typename Take, typename Done>
void run_queries(const QueryCall& call, const Take& take, const Done& done) {
  for_all(call.tasks(), call.work_ns(), free_cores(), [&](std::int64_t task) {
    const AnyIndex& key_index =
        *call.indexes[static_cast<std::size_t>(task / call.heads)];
    const std::int64_t head = task % call.heads;
    static thread_local Scratch scratch;
    TopK top(std::min(call.k, std::max<std::int64_t>(key_index.num_keys(), 1)));
    key_index.query(head, call.views[static_cast<std::size_t>(task)], call.by_page,
                    call.queries.data() + task * call.group * call.head_dim, call.group,
                    call.options, scratch, top,
                    [&](std::int64_t g, TopK& best, std::int64_t visits) {
                      take(task * call.group + g, best.sorted(), visits);
                    });
    done(task, key_index, head);
  });
}

std::tuple<Tensor, Tensor, Tensor> index_topk(const Tensor& handles,
                                              const Tensor& queries, const Tensor& keys,
                                              const Tensor& table, bool by_page,
                                              std::int64_t k, std::int64_t max_visits,
                                              double visit_ratio) {
  const QueryCall call = checked_call("index_topk", handles, queries, keys, table,
                                      by_page, k, max_visits, visit_ratio);
  Tensor slots = call.output({call.heads, call.group, k}, ScalarType::Long);
  Tensor scores = call.output({call.heads, call.group, k}, ScalarType::Float);
  Tensor visits = call.output({call.heads, call.group}, ScalarType::Long);
  std::int64_t* slot = slots.mutable_data_ptr<std::int64_t>();
  float* score = scores.mutable_data_ptr<float>();
  std::int64_t* visit = visits.mutable_data_ptr<std::int64_t>();
  run_queries(
      call,
      [&](std::int64_t row, const std::vector<Scored>& best, std::int64_t visits_made) {
        const auto num_best = static_cast<std::int64_t>(best.size());
        for (std::int64_t i = 0; i < k; ++i) {
          const bool exists = i < num_best;
          slot[row * k + i] = exists ? best[static_cast<std::size_t>(i)].slot : -1;
          score[row * k + i] = exists ? best[static_cast<std::size_t>(i)].score
                                      : -std::numeric_limits<float>::infinity();
        }
        visit[row] = visits_made;
      },
      [](std::int64_t, const AnyIndex&, std::int64_t) {});
  return {slots, scores, visits};
}

std::tuple<Tensor, Tensor> index_pages(const Tensor& handles, const Tensor& queries,
                                       const Tensor& keys, const Tensor& table,
                                       bool by_page, std::int64_t k,
                                       std::int64_t max_visits, double visit_ratio,
                                       std::int64_t max_pages) {
  const char* op = "index_pages";
  const QueryCall call = checked_call(op, handles, queries, keys, table, by_page, k,
                                      max_visits, visit_ratio);
  if (max_pages < 1) fail(op, "max_pages must be positive, got ", max_pages);
  Tensor pages = call.output({call.heads, max_pages}, ScalarType::Long);
  Tensor counts = call.output({call.heads}, ScalarType::Long);
  std::int64_t* page = pages.mutable_data_ptr<std::int64_t>();
  std::int64_t* count = counts.mutable_data_ptr<std::int64_t>();
  std::vector<std::vector<std::vector<Scored>>> best(
      static_cast<std::size_t>(call.tasks()),
      std::vector<std::vector<Scored>>(static_cast<std::size_t>(call.group)));
  run_queries(
      call,
      [&](std::int64_t row, const std::vector<Scored>& own_best, std::int64_t) {
        best[static_cast<std::size_t>(row / call.group)]
            [static_cast<std::size_t>(row % call.group)] = own_best;
      },
      [&](std::int64_t task, const AnyIndex& key_index, std::int64_t head) {
        std::int64_t* out = page + task * max_pages;
        count[task] =
            key_index.pages(head, best[static_cast<std::size_t>(task)], max_pages, out);
        std::fill(out + count[task], out + max_pages, std::int64_t{-1});
      });
  return {pages, counts};
}

Tensor index_places(std::int64_t handle, std::int64_t first) {
  const char* op = "index_places";
  const std::shared_ptr<AnyIndex> key_index = Registry::get().find(op, handle);
  const std::shared_lock<std::shared_mutex> lock(key_index->mutex);
  require_usable(op, *key_index);
  const std::int64_t n = key_index->num_keys();
  if (first < 0 || first > n) fail(op, "first must be 0 to ", n, ", got ", first);
  Tensor places = new_on_cpu({key_index->num_heads(), n - first}, ScalarType::Long);
  std::int64_t* out = places.mutable_data_ptr<std::int64_t>();
  for (std::int64_t head = 0; head < key_index->num_heads(); ++head) {
    for (std::int64_t slot = first; slot < n; ++slot) {
      *out++ = key_index->place(head, slot);
    }
  }
  return places;
}

// int64 [heads, n]: the keys of rows first, first + 1, ... that have pages.
Tensor index_order(std::int64_t handle, std::int64_t first) {
  const char* op = "index_order";
  const std::shared_ptr<AnyIndex> key_index = Registry::get().find(op, handle);
  const std::shared_lock<std::shared_mutex> lock(key_index->mutex);
  require_usable(op, *key_index);
  const std::int64_t stop = key_index->ordered_keys();
  if (first < 0) fail(op, "first must not be negative, got ", first);
  const std::int64_t n = std::max<std::int64_t>(stop - first, 0);
  Tensor order = new_on_cpu({key_index->num_heads(), n}, ScalarType::Long);
  std::int64_t* out = order.mutable_data_ptr<std::int64_t>();
  for (std::int64_t head = 0; head < key_index->num_heads(); ++head) {
    for (std::int64_t i = 0; i < n; ++i) *out++ = key_index->slot_of(head, first + i);
  }
  return order;
}

// [num_keys, memory_bytes, pages of head 0, pages of head 1, ...]
Tensor index_stats(std::int64_t handle) {
  const std::shared_ptr<AnyIndex> key_index =
      Registry::get().find("index_stats", handle);
  const std::shared_lock<std::shared_mutex> lock(key_index->mutex);
  Tensor stats = new_on_cpu({2 + key_index->num_heads()}, ScalarType::Long);
  std::int64_t* out = stats.mutable_data_ptr<std::int64_t>();
  *out++ = key_index->num_keys();
  *out++ = key_index->memory_bytes();
  for (std::int64_t head = 0; head < key_index->num_heads(); ++head) {
    *out++ = key_index->num_pages(head);
  }
  return stats;
}

std::string index_check(std::int64_t handle, const Tensor& keys, const Tensor& table,
                        bool by_page) {
  const char* op = "index_check";
  const std::shared_ptr<AnyIndex> key_index = Registry::get().find(op, handle);
  const std::shared_lock<std::shared_mutex> lock(key_index->mutex);
  require_usable(op, *key_index);
  return key_index->integrity(view_keys(op, keys, table, 1, key_index->num_heads(),
                                        key_index->settings().head_dim),
                              by_page);
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def(
      "index_create(int kind, int num_heads, int head_dim, int page_size, "
      "float promotion, int composite, int simple, int seed, bool by_mean, "
      "int segment=2048, int flat_keys=4096, bool stores_pages=False) -> int");
  m.def("index_destroy(int handle) -> ()");
  m.def("index_append(int handle, Tensor keys, Tensor table, int count) -> ()");
  m.def(
      "index_topk(Tensor handles, Tensor queries, Tensor keys, Tensor table, "
      "bool by_page, int k, int max_visits, float visit_ratio) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "index_pages(Tensor handles, Tensor queries, Tensor keys, Tensor table, "
      "bool by_page, int k, int max_visits, float visit_ratio, int max_pages) "
      "-> (Tensor, Tensor)");
  m.def("index_places(int handle, int first) -> Tensor");
  m.def("index_order(int handle, int first) -> Tensor");
  m.def("index_stats(int handle) -> Tensor");
  m.def("index_check(int handle, Tensor keys, Tensor table, bool by_page) -> str");
}

// Not under CPU: half of the ops take no tensor, and no op has a CUDA version.
STABLE_TORCH_LIBRARY_IMPL(kvp, CompositeExplicitAutograd, m) {
  m.impl("index_create", TORCH_BOX(&kvp::binding::index_create));
  m.impl("index_destroy", TORCH_BOX(&kvp::binding::index_destroy));
  m.impl("index_append", TORCH_BOX(&kvp::binding::index_append));
  m.impl("index_topk", TORCH_BOX(&kvp::binding::index_topk));
  m.impl("index_pages", TORCH_BOX(&kvp::binding::index_pages));
  m.impl("index_places", TORCH_BOX(&kvp::binding::index_places));
  m.impl("index_order", TORCH_BOX(&kvp::binding::index_order));
  m.impl("index_stats", TORCH_BOX(&kvp::binding::index_stats));
  m.impl("index_check", TORCH_BOX(&kvp::binding::index_check));
}
