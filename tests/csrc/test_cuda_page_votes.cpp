// Tests of the CUDA votes on pages, under the emulator: against their definition in
// double precision and against page_votes.hpp, threads in every order.
#include "cuda_fixtures.hpp"
#include "kvp/page_votes.cuh"
#include "vote_fixtures.hpp"

namespace {

using namespace cuda_test;
using namespace vote_test;

template <typename Element>
std::vector<float> run(const Request<Element>& request, bool largest, bool named,
                       const Indices& table) {
  std::vector<float> out(request.votes(), -1.0f);
  const Call<Element> host = request.call(largest, out.data());
  const kvp::Plane& plane = host.kv.layout.keys;
  const bool rows = named && plane.kind == kvp::PlaneKind::kRows;
  kvp::PagedKV<const Element> kv = host.kv;
  kv.layout.keys =
      kvp::device_plane(plane.offsets, plane.base, rows ? plane.slot_stride : 0);
  const kvp::cuda::VoteCall<Element> call{
      host.kv_heads,
      host.group,
      host.num_queries,
      host.slots,
      host.scale,
      largest,
      host.queries,
      host.query_positions,
      host.own_keys,
      kv,
      {table.data(), host.kv_heads, host.table.pages_per_row},
      host.positions,
      host.out};
  std::vector<float> scratch(static_cast<std::size_t>(kvp::cuda::vote_scratch(call)));
  kvp::cuda::vote(call, scratch.data(), nullptr);
  return out;
}

template <typename Element>
void test_votes(const Shape& shape, std::mt19937& random, bool all_turns = true) {
  Request<Element> request(shape, random);
  for (const bool largest : {false, true}) {
    const std::vector<double> expected = request.expected(largest);
    const std::vector<float> first = run(request, largest, true, request.table);
    CHECK(error_of(first, expected) < 2e-6 * static_cast<double>(shape.num_queries));
    for (std::size_t i = 0; i < first.size(); ++i) {
      if (expected[i] == 0.0) CHECK(first[i] == 0.0f);  // no query sees it
    }
    std::vector<float> host(request.votes());
    kvp::page_votes::vote(kvp::select_kernels<kvp::page_votes::Kernels>(),
                          request.call(largest, host.data()));
    for (std::size_t i = 0; i < host.size(); ++i) {
      CHECK(std::fabs(host[i] - first[i]) <= 1e-5f * host[i] + 1e-12f);
    }
    if (kFewThreads || !all_turns) continue;
    check_all_turns(first, [&] { return run(request, largest, true, request.table); });
    CHECK(run(request, largest, false, request.table) == first);
  }
}

// Neither NaN keys nor missing queries change the votes of other slots.
void test_sick_keys(std::mt19937& random) {
  const Shape shape{2, 2, 34, 130, 16, 40, Order::kNatural, false, false};
  Request<float> request(shape, random);
  const Index sick = 65;  // the last key of a lane that has one before it, and after
  request.key(1, sick, 3) = std::numeric_limits<float>::quiet_NaN();
  for (const bool largest : {false, true}) {
    const std::vector<float> found = run(request, largest, true, request.table);
    std::vector<float> host(request.votes());
    kvp::page_votes::vote(kvp::select_kernels<kvp::page_votes::Kernels>(),
                          request.call(largest, host.data()));
    for (std::size_t i = 0; i < host.size(); ++i) {
      CHECK(std::fabs(host[i] - found[i]) <= 1e-5f * host[i] + 1e-12f);
    }
    for (const Index head : {Index{2}, Index{3}}) {
      CHECK(found[static_cast<std::size_t>(head * shape.slots + sick)] == 0.0f);
    }
  }
  Shape without_queries = shape;
  without_queries.num_queries = 0;
  const Request<float> silent(without_queries, random);
  for (const float vote : run(silent, false, true, silent.table)) CHECK(vote == 0.0f);
}

void test_traps(std::mt19937& random) {
  const Shape shape{1, 1, 2, 40, 16, 8, Order::kNatural, false, false};
  const Request<float> request(shape, random);
  for (const Index wrong : {Index{-1}, Index{1} << 40}) {
    Indices table = request.table;
    table[2] = wrong;
    CHECK(traps([&] { run(request, false, true, table); }));
  }
  // Pages after the last slot, or without a token, need not exist.
  Request<float> sparse = request;
  std::fill_n(sparse.positions.begin() + 16, 16, -1);
  Indices table = request.table;
  table[3] = table[1] = -1;
  CHECK(!traps([&] { run(sparse, false, true, table); }));
}

}  // namespace

int main() {
  const unsigned seed = 20254;
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  if (kFewThreads) {
    test_votes<BFloat16>({1, 1, 40, 70, 16, 40, Order::kNatural, true, true}, random);
    return report();
  }
  current_case = "float32";
  for (const Shape& shape : shapes()) test_votes<float>(shape, random, false);
  const Shape shape{2, 2, 34, 70, 16, 40, Order::kInterleaved, true, true};
  current_case = "bfloat16";
  test_votes<BFloat16>(shape, random);
  current_case = "float16";
  test_votes<Float16>(shape, random);
  current_case = "several parts";
  test_votes<BFloat16>({1, 2, 3, 2100, 16, 16, Order::kInterleaved, true, true},
                       random);
  current_case = "more rows than a launch has threads";
  test_votes<float>({2, 8, 90, 40, 16, 8, Order::kNatural, true, false}, random, false);
  current_case = "sick keys";
  test_sick_keys(random);
  current_case = "traps";
  test_traps(random);
  return report();
}
