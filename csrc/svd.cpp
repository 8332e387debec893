// torch bindings of kvp/svd.hpp and kvp/low_rank.hpp. The CUDA version of the
// reconstruction is in svd.cu.
#include "kvp/svd.hpp"

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "factor_check.hpp"
#include "kvp/for_all.hpp"

namespace kvp::binding {
namespace {

// Spans, the same in every plane; matrix = plane * count + span.
struct Spans {
  const Index* starts;
  const Index* lengths;
  Index count;
};

Spans checked_spans(const char* op, const Tensor& rows, const Tensor& starts,
                    const Tensor& lengths) {
  Argument{op, "rows", rows}.require_dim(3);
  if (!rows.is_cpu()) fail(op, "rows must be on the CPU");
  if (rows.size(2) < 1 || rows.size(2) > kMaxHeadDim) {
    fail(op, "head_dim must be 1 to ", kMaxHeadDim, ", got ", rows.size(2));
  }
  if (rows.size(2) > 1 && rows.stride(2) != 1) {
    fail(op, "the elements of a row must be contiguous");
  }
  const Index* start = numbers(op, "starts", starts, -1);
  const Index count = starts.size(0);
  const Index* length = numbers(op, "lengths", lengths, count);
  for (Index s = 0; s < count; ++s) {
    if (start[s] < 0 || length[s] < 0 || start[s] > rows.size(1) ||
        length[s] > rows.size(1) - start[s]) {
      fail(op, "span ", s, " is ", length[s], " tokens from ", start[s],
           ", but there are tokens 0 to ", rows.size(1) - 1);
    }
  }
  return {start, length, count};
}

void require_sound(const char* op, const std::vector<svd::Fault>& faults, Index spans) {
  for (std::size_t i = 0; i < faults.size(); ++i) {
    const Index plane = static_cast<Index>(i) / spans;
    const Index span = static_cast<Index>(i) % spans;
    switch (faults[i]) {
      case svd::Fault::kNone:
        break;
      case svd::Fault::kNotFinite:
        fail(op, "span ", span, " of plane ", plane, " holds NaN or infinities");
      case svd::Fault::kTooLarge:
        fail(op, "span ", span, " of plane ", plane,
             " has a singular value beyond float32");
      case svd::Fault::kNoEigenvalue:
        fail(op, "the iteration did not converge for span ", span, " of plane ", plane);
    }
  }
}

// The shape of each span's record, assuming the largest possible ranks.
template <typename Factor>
std::vector<svd::Record<Factor>> roomy_shapes(const Spans& spans, Index head_dim,
                                              Index max_rank, bool rows_if_smaller) {
  std::vector<svd::Record<Factor>> shapes;
  for (Index s = 0; s < spans.count; ++s) {
    const Index tokens = spans.lengths[s];
    const Index rank = std::min(std::min(tokens, head_dim), max_rank);
    shapes.push_back(rows_if_smaller
                         ? svd::smallest_record<Factor>(tokens, head_dim, max_rank)
                         : svd::Record<Factor>{tokens, head_dim, rank});
  }
  return shapes;
}

// Offsets of the records of all planes.
template <typename Factor>
std::vector<Index> roomy_offsets(const std::vector<svd::Record<Factor>>& shapes,
                                 Index planes) {
  std::vector<Index> offsets{0};
  for (Index plane = 0; plane < planes; ++plane) {
    for (const auto& shape : shapes) {
      offsets.push_back(offsets.back() + shape.elements());
    }
  }
  return offsets;
}

// Multiply-adds that take as long as the decompositions, as measured. The
// eigenvectors dominate, because most of their operations depend on each other.
Index decompose_work(const Spans& spans, Index planes, Index head_dim) {
  Index sum = 0;
  for (Index s = 0; s < spans.count; ++s) {
    const Index size = std::min(spans.lengths[s], head_dim);
    sum += 24 * size * size * size;
  }
  return sum * planes;
}

// Decomposes all matrices and removes the gaps that lower ranks leave.
template <typename Element, typename Factor>
Tensor decompose_all(const char* op, const Tensor& rows, const Spans& spans,
                     const svd::Options& options, bool rows_if_smaller, ScalarType type,
                     Index* ranks, Index* offsets) {
  const Index head_dim = rows.size(2), count = rows.size(0) * spans.count;
  const auto shapes =
      roomy_shapes<Factor>(spans, head_dim, options.max_rank, rows_if_smaller);
  const std::vector<Index> roomy = roomy_offsets(shapes, rows.size(0));
  Tensor room = torch::stable::new_empty(rows, {roomy.back()}, type);
  auto* base = static_cast<Factor*>(room.mutable_data_ptr());
  const auto* first = static_cast<const Element*>(rows.const_data_ptr());
  const svd::Kernels& kernels = kvp::select_kernels<svd::Kernels>();
  std::vector<svd::Fault> faults(static_cast<std::size_t>(count));
  for_all(count, Work::products(decompose_work(spans, rows.size(0), head_dim)),
          [&](Index i) {
            static thread_local svd::Workspace work;
            const Index plane = i / spans.count, span = i % spans.count;
            const svd::Matrix<Element> matrix{
                first + plane * rows.stride(0) + spans.starts[span] * rows.stride(1),
                spans.lengths[span], head_dim, rows.stride(1)};
            const auto at = static_cast<std::size_t>(i);
            if (shapes[static_cast<std::size_t>(span)].holds_rows()) {
              svd::store_rows(matrix, base + roomy[at], faults[at]);
              ranks[i] = svd::kRows;
              return;
            }
            ranks[i] = svd::decompose(kernels, matrix, options, base + roomy[at], work,
                                      faults[at]);
          });
  require_sound(op, faults, spans.count);
  offsets[0] = 0;
  for (Index i = 0; i < count; ++i) {
    const Index tokens = spans.lengths[i % spans.count];
    offsets[i + 1] =
        offsets[i] + svd::Record<Factor>{tokens, head_dim, ranks[i]}.elements();
  }
  if (offsets[count] == roomy.back()) return room;
  Tensor factors = torch::stable::new_empty(rows, {offsets[count]}, type);
  auto* packed = static_cast<Factor*>(factors.mutable_data_ptr());
  for (Index i = 0; i < count; ++i) {
    std::memcpy(packed + offsets[i], base + roomy[static_cast<std::size_t>(i)],
                static_cast<std::size_t>(offsets[i + 1] - offsets[i]) * sizeof(Factor));
  }
  return factors;
}

// (factors [elements], offsets int64 [matrices + 1], ranks int64 [matrices])
std::tuple<Tensor, Tensor, Tensor> truncated_svd(
    const Tensor& rows, const Tensor& starts, const Tensor& lengths,
    std::int64_t max_rank, double energy, bool in_bfloat16, bool rows_if_smaller) {
  const char* op = "truncated_svd";
  const Spans spans = checked_spans(op, rows, starts, lengths);
  if (max_rank < 1) fail(op, "max_rank must be positive, got ", max_rank);
  if (!(energy > 0.0 && energy <= 1.0)) {
    fail(op, "energy must be above 0 and at most 1, got ", energy);
  }
  const svd::Options options{max_rank, energy};
  const Index count = rows.size(0) * spans.count;
  Tensor ranks = torch::stable::new_empty(starts, {count});
  Tensor offsets = torch::stable::new_empty(starts, {count + 1});
  auto* rank = ranks.mutable_data_ptr<std::int64_t>();
  auto* offset = offsets.mutable_data_ptr<std::int64_t>();
  Tensor factors = rows;  // Tensor has no default constructor
  with_number(Argument{op, "rows", rows}, [&](auto* tag) {
    using Element = std::remove_pointer_t<decltype(tag)>;
    factors =
        in_bfloat16
            ? decompose_all<Element, BFloat16>(op, rows, spans, options,
                                               rows_if_smaller, ScalarType::BFloat16,
                                               rank, offset)
            : decompose_all<Element, float>(op, rows, spans, options, rows_if_smaller,
                                            ScalarType::Float, rank, offset);
  });
  return {factors, offsets, ranks};
}

Tensor reconstruct(const Tensor& factors, const Tensor& offsets, const Tensor& ranks,
                   const Tensor& tokens, std::int64_t head_dim, const Tensor& which,
                   bool in_bfloat16) {
  const char* op = "reconstruct";
  const Chosen chosen(
      op, checked_factors(op, "factors", factors, offsets, ranks, tokens, head_dim),
      which);
  const std::vector<Index> first = chosen.row_offsets();
  Tensor rows =
      torch::stable::new_empty(factors, {first.back(), head_dim},
                               in_bfloat16 ? ScalarType::BFloat16 : ScalarType::Float);
  const svd::Kernels& kernels = kvp::select_kernels<svd::Kernels>();
  with_number(Argument{op, "factors", factors}, [&](auto* factor_tag) {
    using Factor = std::remove_pointer_t<decltype(factor_tag)>;
    with_number(Argument{op, "rows", rows}, [&](auto* row_tag) {
      for_all(chosen.count, Work::products(chosen.work()), [&](Index i) {
        static thread_local svd::Workspace work;
        svd::reconstruct_rows(
            kernels, chosen.shape<Factor>(i), chosen.record<Factor>(i),
            write(rows, row_tag) + first[static_cast<std::size_t>(i)] * head_dim, work);
      });
    });
  });
  return rows;
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def(
      "truncated_svd(Tensor rows, Tensor starts, Tensor lengths, int max_rank, "
      "float energy, bool in_bfloat16, bool rows_if_smaller) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "reconstruct(Tensor factors, Tensor offsets, Tensor ranks, Tensor tokens, "
      "int head_dim, Tensor which, bool in_bfloat16) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("truncated_svd", TORCH_BOX(&kvp::binding::truncated_svd));
  m.impl("reconstruct", TORCH_BOX(&kvp::binding::reconstruct));
}
