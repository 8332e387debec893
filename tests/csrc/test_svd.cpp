// Tests of kvp/svd.hpp against one-sided Jacobi rotations in double precision.
#include "kvp/for_all.hpp"
#include "svd_fixtures.hpp"

namespace {

// All singular values, descending: one-sided Jacobi (Hestenes 1958).
template <typename Element>
std::vector<double> jacobi(const Problem<Element>& problem) {
  const bool turned = problem.tokens <= problem.head_dim;
  const Index m = turned ? problem.tokens : problem.head_dim;
  const Index n = turned ? problem.head_dim : problem.tokens;
  std::vector<std::vector<double>> rows(u(m), std::vector<double>(u(n)));
  for (Index i = 0; i < m; ++i) {
    for (Index j = 0; j < n; ++j) {
      rows[u(i)][u(j)] = turned ? problem.at(i, j) : problem.at(j, i);
    }
  }
  for (int sweep = 0; sweep < 40; ++sweep) {
    bool turning = false;
    for (std::size_t p = 0; p < rows.size(); ++p) {
      for (std::size_t q = p + 1; q < rows.size(); ++q) {
        double pp = 0, qq = 0, pq = 0;
        for (std::size_t j = 0; j < rows[p].size(); ++j) {
          pp += rows[p][j] * rows[p][j];
          qq += rows[q][j] * rows[q][j];
          pq += rows[p][j] * rows[q][j];
        }
        if (std::fabs(pq) <= 1e-15 * std::sqrt(pp * qq)) continue;
        turning = true;
        const double zeta = (qq - pp) / (2 * pq);
        const double t =
            (zeta < 0 ? -1 : 1) / (std::fabs(zeta) + std::sqrt(1 + zeta * zeta));
        const double c = 1 / std::sqrt(1 + t * t), s = c * t;
        for (std::size_t j = 0; j < rows[p].size(); ++j) {
          const double x = rows[p][j], y = rows[q][j];
          rows[p][j] = c * x - s * y;
          rows[q][j] = s * x + c * y;
        }
      }
    }
    if (!turning) break;
  }
  std::vector<double> sigma;
  for (const auto& row : rows) {
    double sum = 0;
    for (double x : row) sum += x * x;
    sigma.push_back(std::sqrt(sum));
  }
  std::sort(sigma.rbegin(), sigma.rend());
  return sigma;
}

template <typename Element>
double squared_norm(const Problem<Element>& problem) {
  double sum = 0;
  for (Index t = 0; t < problem.tokens; ++t) {
    for (Index d = 0; d < problem.head_dim; ++d) {
      sum += problem.at(t, d) * problem.at(t, d);
    }
  }
  return sum;
}

template <typename Element, typename Factor>
double error_of(const Problem<Element>& problem, const Decomposed<Factor>& made) {
  double sum = 0;
  for (Index t = 0; t < problem.tokens; ++t) {
    for (Index d = 0; d < problem.head_dim; ++d) {
      const double difference = problem.at(t, d) - made.row(t, d);
      sum += difference * difference;
    }
  }
  return std::sqrt(sum);
}

template <typename Factor>
void check_orthonormal(const Decomposed<Factor>& made, double tolerance) {
  const Record<Factor>& shape = made.shape;
  for (Index i = 0; i < shape.rank; ++i) {
    for (Index j = 0; j <= i; ++j) {
      double left = 0, right = 0;
      for (Index t = 0; t < shape.tokens; ++t)
        left += made.left(t, i) * made.left(t, j);
      for (Index d = 0; d < shape.head_dim; ++d) {
        right += made.right(i, d) * made.right(j, d);
      }
      CHECK(std::fabs(left - double(i == j)) < tolerance);
      CHECK(std::fabs(right - double(i == j)) < tolerance);
    }
    CHECK(i == 0 || made.sigma(i) <= made.sigma(i - 1));
    CHECK(made.sigma(i) > 0);
  }
}

template <typename Element>
void check_best(const Problem<Element>& problem, const std::vector<double>& sigma,
                Index max_rank) {
  const Index size = std::min(problem.tokens, problem.head_dim);
  const auto wide = decompose<float>(problem, max_rank);
  const auto narrow = decompose<BFloat16>(problem, max_rank);
  CHECK(wide.fault == Fault::kNone && narrow.fault == Fault::kNone);
  CHECK(wide.shape.rank == narrow.shape.rank);
  check_orthonormal(wide, 1e-4);
  check_orthonormal(narrow, 0.03);
  const Index wanted = std::min(size, max_rank);
  const bool projected = 2 * kvp::svd::subspace_width(wanted) <= size;
  double rest = 0, norm = std::sqrt(squared_norm(problem));
  Index exact = 0;
  for (Index k = 0; k < size; ++k) {
    const double zero = double(std::max(problem.tokens, problem.head_dim)) * 0x1p-23;
    exact += sigma[u(k)] > zero * sigma[0];
    if (k >= wide.shape.rank) rest += sigma[u(k)] * sigma[u(k)];
    if (k < wide.shape.rank && !projected) {
      CHECK(std::fabs(wide.sigma(k) - sigma[u(k)]) < 1e-6 * sigma[0]);
    }
  }
  CHECK(wide.shape.rank == std::min(exact, max_rank));
  const double best = std::sqrt(rest), error = error_of(problem, wide);
  CHECK(error <= (projected ? 1.05 : 1.0001) * best + 2e-6 * norm);
  CHECK(error >= best * 0.9999 - 2e-6 * norm);
  CHECK(error_of(problem, narrow) <= 1.05 * best + 0.006 * norm);
}

void test_best(std::mt19937& random) {
  const Spectrum kinds[] = {Spectrum::kFlat, Spectrum::kDecaying, Spectrum::kLowRank,
                            Spectrum::kConstant, Spectrum::kDuplicate};
  const char* names[] = {"flat", "decaying", "low rank", "constant", "duplicate"};
  const Index sizes[][2] = {{1, 1},   {1, 64},  {2, 3},    {7, 5},   {16, 64},
                            {17, 24}, {40, 40}, {39, 100}, {97, 96}, {150, 43}};
  for (const auto& size : sizes) {
    for (int kind = 0; kind < 5; ++kind) {
      current_case = names[kind];
      const auto wide = make_problem<float>(size[0], size[1], kinds[kind], random);
      const std::vector<double> sigma = jacobi(wide);
      for (Index max_rank : {1, 8, 32}) check_best(wide, sigma, max_rank);
      const auto half = make_problem<BFloat16>(size[0], size[1], kinds[kind], random);
      if (size[0] < 50) check_best(half, jacobi(half), 100);
    }
  }
}

void test_energy(std::mt19937& random) {
  current_case = "energy";
  for (Index tokens : {5, 30, 100}) {
    const auto problem = make_problem<float>(tokens, 64, Spectrum::kDecaying, random);
    const std::vector<double> sigma = jacobi(problem);
    const double total = squared_norm(problem);
    for (double energy : {0.3, 0.9, 0.99, 0.9999}) {
      const Index rank = decompose<float>(problem, 64, energy).shape.rank;
      double kept = 0;
      for (Index k = 0; k < rank; ++k) kept += sigma[u(k)] * sigma[u(k)];
      CHECK(kept >= energy * total * (1 - 1e-9));
      CHECK(kept - sigma[u(rank - 1)] * sigma[u(rank - 1)] < energy * total);
    }
    CHECK(decompose<float>(problem, 2, 0.9999).shape.rank == 2);
  }
}

void test_degenerate(std::mt19937& random) {
  current_case = "nothing";
  CHECK(decompose<float>(Problem<float>{0, 64, 64, {}}, 32).shape.rank == 0);
  current_case = "zeros";
  Problem<float> zeros{9, 64, 64, std::vector<float>(9 * 64)};
  const auto none = decompose<float>(zeros, 32);
  CHECK(none.shape.rank == 0 && none.fault == Fault::kNone && none.record.empty());
  for (float value : {NAN, INFINITY, -INFINITY}) {
    current_case = "not finite";
    for (Index tokens : {5, 100}) {
      auto problem = make_problem<float>(tokens, 64, Spectrum::kFlat, random);
      problem.elements[u(4 * problem.stride + 63)] = value;
      const auto made = decompose<float>(problem, 32);
      CHECK(made.fault == Fault::kNotFinite && made.shape.rank == 0);
    }
  }
  current_case = "largest";
  Problem<float> huge{20, 64, 64, std::vector<float>(20 * 64, 3e38f)};
  CHECK(decompose<float>(huge, 32).fault == Fault::kTooLarge);
  for (float scale : {3e36f, 1e-36f, 1e-42f}) {
    current_case = "scale";
    auto problem = make_problem<float>(20, 64, Spectrum::kLowRank, random);
    for (float& x : problem.elements) x *= scale;
    const auto made = decompose<float>(problem, 32);
    CHECK(made.fault == Fault::kNone && made.shape.rank >= 3);
    check_orthonormal(made, 1e-3);
    CHECK(error_of(problem, made) <= 1e-3 * std::sqrt(squared_norm(problem)));
  }
  current_case = "smallest";
  Problem<float> smallest{1, 2, 2, {std::numeric_limits<float>::denorm_min(), 0.0f}};
  const auto tiny = decompose<float>(smallest, 32);
  CHECK(tiny.shape.rank == 1 && tiny.row(0, 0) == smallest.at(0, 0));
  // Singular values of 6.5 and 0.46 times the smallest float: the lower becomes 0.
  const float unit = std::numeric_limits<float>::denorm_min();
  Problem<float> pair{2, 2, 2, {3 * unit, 3 * unit, 3 * unit, 4 * unit}};
  CHECK(decompose<float>(pair, 32).shape.rank == 1);
}

// The same bits whatever the buffers held before, on any number of threads.
void test_determinism(std::mt19937& random) {
  current_case = "threads";
  std::vector<Problem<float>> problems;
  for (Index i = 0; i < 40; ++i) {
    problems.push_back(
        make_problem<float>(1 + 11 * i % 130, 80, Spectrum::kFlat, random));
  }
  const auto run = [&](bool parallel) {
    std::vector<std::vector<float>> records(problems.size());
    kvp::for_all(Index(problems.size()), kvp::Work{parallel, 1}, [&](Index i) {
      static thread_local Workspace work;
      const Problem<float>& problem = problems[u(i)];
      const Index rank = std::min<Index>({problem.tokens, 80, 16});
      records[u(i)].resize(u(Record<float>{problem.tokens, 80, rank}.elements()));
      Fault fault;
      kvp::svd::decompose(*kernels, problem.matrix(), Options{16, 1.0},
                          records[u(i)].data(), work, fault);
    });
    return records;
  };
  const auto alone = run(false);
  for (int round = 0; round < 3; ++round) CHECK(run(true) == alone);
}

}  // namespace

int main() {
  std::mt19937 random(kSeed);
  with_all_kernels([&] {
    test_best(random);
    test_energy(random);
    test_degenerate(random);
    test_determinism(random);
  });
  std::printf("%d failure(s)\n", failures);
  return failures != 0;
}
