// Checks of the arguments of ops on low-rank factors (kvp/factor_record.hpp).
#pragma once

#include <algorithm>
#include <vector>

#include "binding.hpp"
#include "kvp/elements.hpp"
#include "kvp/factor_record.hpp"

namespace kvp::binding {

using svd::Index;

// Larger than any context, and small enough that sizes of records do not overflow.
inline constexpr Index kMaxTokens = Index{1} << 40;

// Calls body with a null pointer of the type of a float32 or bfloat16 tensor.
template <typename Body>
void with_number(const Argument& argument, const Body& body) {
  const ScalarType type = argument.tensor.scalar_type();
  if (type == ScalarType::Float) {
    body(static_cast<float*>(nullptr));
  } else if (type == ScalarType::BFloat16) {
    body(static_cast<BFloat16*>(nullptr));
  } else {
    fail(argument.op, argument.name, " must be float32 or bfloat16, got ",
         type_name(type));
  }
}

inline const Index* numbers(const char* op, const char* name, const Tensor& tensor,
                            Index size) {
  if (!tensor.is_cpu()) fail(op, name, " must be on the CPU");
  return Argument{op, name, tensor}.indices(tensor, size);
}

// The packed factors of many matrices.
struct Factors {
  const char* name;
  const Tensor& tensor;
  const Index* offsets;
  const Index* ranks;
  const Index* tokens;
  Index matrices;
  Index head_dim;
  // Facts about the tensor, cached because there may be thousands of records.
  Index size;   // elements
  bool in_bfloat16;  // otherwise float32

  template <typename Factor>
  svd::Record<Factor> shape(Index at) const {
    return {tokens[at], head_dim, ranks[at]};
  }
  template <typename Factor>
  const Factor* record(Index at) const {
    return static_cast<const Factor*>(tensor.const_data_ptr()) + offsets[at];
  }
  template <typename Factor>
  bool is_sound(Index at) const {
    const Index begin = offsets[at], end = offsets[at + 1];
    return begin >= 0 && end >= begin && end <= size && tokens[at] >= 0 &&
           tokens[at] <= kMaxTokens && ranks[at] >= svd::kRows &&
           ranks[at] <= std::min(tokens[at], head_dim) &&
           shape<Factor>(at).elements() == end - begin;
  }
  // Multiply-adds of a reconstruction; a copy of rows counts as one component.
  Index work(Index at) const {
    return tokens[at] * std::max<Index>(ranks[at], 1) * head_dim;
  }
  void require_record(const char* op, Index at) const {
    if (in_bfloat16 ? is_sound<BFloat16>(at) : is_sound<float>(at)) return;
    fail(op, name, ": matrix ", at, " is not a record of rank ", ranks[at], " and ",
         tokens[at], " tokens");
  }
};

// Checks everything except the records. The factors must be on the device of `heap`, or
// on the CPU without one. The tensors that locate the records are always on the CPU.
inline Factors checked_factors(const char* op, const char* name, const Tensor& factors,
                               const Tensor& offsets, const Tensor& ranks,
                               const Tensor& tokens, Index head_dim,
                               const Tensor* heap = nullptr) {
  const Argument argument{op, name, factors};
  argument.require_dim(1);
  argument.require_contiguous();
  if (heap != nullptr) argument.require_device_of(*heap);
  if (heap == nullptr && !factors.is_cpu()) fail(op, name, " must be on the CPU");
  with_number(argument, [](auto*) {});
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    fail(op, "head_dim must be 1 to ", kMaxHeadDim, ", got ", head_dim);
  }
  const Index* rank = numbers(op, "ranks", ranks, -1);
  const Index matrices = ranks.size(0);
  return {name,
          factors,
          numbers(op, "offsets", offsets, matrices + 1),
          rank,
          numbers(op, "tokens", tokens, matrices),
          matrices,
          head_dim,
          factors.size(0),
          factors.scalar_type() == ScalarType::BFloat16};
}

// Some matrices of packed factors, with checked records.
struct Chosen {
  Factors all;
  const Index* which;
  Index count;

  Chosen(const char* op, const Factors& factors, const Tensor& matrices)
      : all(factors),
        which(numbers(op, "which", matrices, -1)),
        count(matrices.size(0)) {
    for (Index i = 0; i < count; ++i) {
      if (which[i] < 0 || which[i] >= all.matrices) {
        fail(op, "which[", i, "] is matrix ", which[i], ", but there are 0 to ",
             all.matrices - 1);
      }
      all.require_record(op, which[i]);
    }
  }

  template <typename Factor>
  svd::Record<Factor> shape(Index i) const {
    return all.shape<Factor>(which[i]);
  }
  template <typename Factor>
  const Factor* record(Index i) const {
    return all.record<Factor>(which[i]);
  }
  // Multiply-adds of all chosen matrices.
  Index work() const {
    Index sum = 0;
    for (Index i = 0; i < count; ++i) sum += all.work(which[i]);
    return sum;
  }
  // Number of result rows before each matrix; the last entry is their total.
  std::vector<Index> row_offsets() const {
    std::vector<Index> offsets{0};
    for (Index i = 0; i < count; ++i) {
      offsets.push_back(offsets.back() + all.tokens[which[i]]);
    }
    return offsets;
  }
};

}  // namespace kvp::binding
