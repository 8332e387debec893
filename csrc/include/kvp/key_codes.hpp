// Keys in one byte per dimension, and queries to match.
//
// A key k becomes the code u[d] = round((k[d] - center[d]) / (width[d] * scale)) + 64,
// with the mean and the standard deviation of each dimension over the first keys, and one
// scale per key. Codes are 1 to 127. A query q becomes round(q[d] * width[d] / step). Then
//
//     q . (k - center)  ~  step * scale * sum of (u - 64) * query code
//
// and q . center is the same for all keys, so that it does not change their order. Without
// center and width, a few dimensions with large means would take all bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kvp/arena.hpp"
#include "kvp/code_kernels.hpp"
#include "kvp/index_common.hpp"

namespace kvp::index {

constexpr int kZeroCode = 64, kLargestCode = 63, kLargestQueryCode = 127;

// Center and width of each dimension.
class CodeSpace {
 public:
  std::int64_t dims() const { return static_cast<std::int64_t>(center_.size()); }
  std::int64_t quads() const { return (dims() + kQuad - 1) / kQuad; }
  bool empty() const { return center_.empty(); }
  const float* center() const { return center_.data(); }
  float width(std::int64_t d) const { return width_[static_cast<std::size_t>(d)]; }

  // Measures rows [n][dims], n >= 1.
  void fit(const float* rows, std::int64_t n, std::int64_t dims) {
    center_.resize(static_cast<std::size_t>(dims));
    width_.resize(static_cast<std::size_t>(dims));
    for (std::int64_t d = 0; d < dims; ++d) {
      double sum = 0.0, square = 0.0;
      for (std::int64_t i = 0; i < n; ++i) sum += rows[i * dims + d];
      const double mean = sum / static_cast<double>(n);
      for (std::int64_t i = 0; i < n; ++i) {
        const double off = rows[i * dims + d] - mean;
        square += off * off;
      }
      const auto at = static_cast<std::size_t>(d);
      center_[at] = static_cast<float>(mean);
      width_[at] = static_cast<float>(std::sqrt(square / static_cast<double>(n)));
    }
    // A constant dimension gets a width as well: later keys may differ there.
    const float largest = *std::max_element(width_.begin(), width_.end());
    // Far below any key that matters, and large enough that no later key overflows.
    const float least = largest > 0.0f ? std::max(1e-3f * largest, 1e-12f) : 1.0f;
    for (float& width : width_) width = std::max(width, least);
  }

 private:
  std::vector<float> center_, width_;
};

// Writes the codes of queries [group][dims] to scratch. With the score that a kernel
// computes, query . key ~ steps[g] * score + offsets[g].
inline void encode_queries(const CodeSpace& space, const float* queries,
                           std::int64_t group, CodeScratch& scratch) {
  const std::int64_t dims = space.dims(), padded = space.quads() * kQuad;
  scratch.queries.assign(static_cast<std::size_t>(group * padded), 0);
  scratch.biases.resize(static_cast<std::size_t>(group));
  scratch.steps.resize(static_cast<std::size_t>(group));
  scratch.offsets.resize(static_cast<std::size_t>(group));
  for (std::int64_t g = 0; g < group; ++g) {
    const float* query = queries + g * dims;
    std::int8_t* code = scratch.queries.data() + g * padded;
    float peak = 0.0f, offset = 0.0f;
    for (std::int64_t d = 0; d < dims; ++d) {
      peak = std::max(peak, std::fabs(query[d] * space.width(d)));
      offset += query[d] * space.center()[d];
    }
    const float inverse = peak > 0.0f ? kLargestQueryCode / peak : 0.0f;
    std::int32_t sum = 0;
    for (std::int64_t d = 0; d < dims; ++d) {
      code[d] =
          static_cast<std::int8_t>(std::lrint(query[d] * space.width(d) * inverse));
      sum += code[d];
    }
    scratch.biases[static_cast<std::size_t>(g)] = -kZeroCode * sum;
    scratch.steps[static_cast<std::size_t>(g)] = peak / kLargestQueryCode;
    scratch.offsets[static_cast<std::size_t>(g)] = offset;
  }
}

// Codes of some rows, in blocks (see code_kernels.hpp). The last block is padded with rows
// whose scale is 0. Blocks lie in chunks that never move: growing copies nothing, and at
// most one chunk is partly used.
class KeyCodes {
 public:
  explicit KeyCodes(Arena& arena) : arena_(&arena), chunks_(arena) {}

  std::int64_t size() const { return size_; }
  std::int64_t blocks() const { return (size_ + kCodeBlock - 1) / kCodeBlock; }

  // Adds rows [n][dims]. All calls need the same space.
  void append(const CodeSpace& space, const float* rows, std::int64_t n) {
    set_shape(space);
    const std::int64_t needed = (size_ + n + kCodeBlock - 1) / kCodeBlock;
    while (chunks_.size() * chunk_blocks_ < needed) {
      auto* chunk = static_cast<std::uint8_t*>(arena_->take(chunk_bytes_));
      std::memset(chunk, 0, chunk_bytes_);
      chunks_.push(chunk);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      set(space, size_ + i, rows + i * space.dims());
    }
    size_ += n;
  }

  // row[d] = the key that the code stands for, minus the center.
  void decode(const CodeSpace& space, std::int64_t at, float* row) const {
    const float own_scale = scale(at);
    for (std::int64_t d = 0; d < space.dims(); ++d) {
      row[d] = static_cast<float>(code(at, d) - kZeroCode) * own_scale * space.width(d);
    }
  }

  // Row first + i becomes what row order[i] was; order is a permutation of
  // [first, first + n).
  void permute(const CodeSpace& space, std::int64_t first, const std::int32_t* order,
               std::int64_t n) {
    const std::int64_t dims = space.dims();
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(n * dims));
    std::vector<float> scales(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) {
      scales[static_cast<std::size_t>(i)] = scale(order[i]);
      for (std::int64_t d = 0; d < dims; ++d) {
        codes[static_cast<std::size_t>(i * dims + d)] = code(order[i], d);
      }
    }
    for (std::int64_t i = 0; i < n; ++i) {
      scale(first + i) = scales[static_cast<std::size_t>(i)];
      for (std::int64_t d = 0; d < dims; ++d) {
        code(first + i, d) = codes[static_cast<std::size_t>(i * dims + d)];
      }
    }
  }

  // What a kernel needs to score the blocks of a list, or the first `blocks` ones.
  CodeRun run(const CodeScratch& scratch, std::int64_t group, const std::int32_t* list,
              std::int64_t blocks, float* scores, std::int64_t stride) const {
    return {chunks_.data(),         chunk_blocks_,         list,  blocks, quads_,
            scratch.queries.data(), scratch.biases.data(), group, scores, stride};
  }

 private:
  friend struct CodeBreaker;

  static constexpr std::int64_t kChunkBytes = 16 * 1024;

  void set_shape(const CodeSpace& space) {
    quads_ = space.quads();
    chunk_blocks_ = std::max<std::int64_t>(kChunkBytes / block_bytes(quads_), 1);
    chunk_bytes_ = static_cast<std::size_t>(chunk_blocks_ * block_bytes(quads_));
  }

  std::uint8_t* block(std::int64_t row) const {
    const std::int64_t at = row / kCodeBlock;
    return chunks_[at / chunk_blocks_] + at % chunk_blocks_ * block_bytes(quads_);
  }
  std::uint8_t& code(std::int64_t row, std::int64_t d) const {
    return block(row)[(d / kQuad * kCodeBlock + row % kCodeBlock) * kQuad + d % kQuad];
  }
  float& scale(std::int64_t row) const {
    auto* scales = reinterpret_cast<float*>(block(row) + quads_ * kQuadBytes);
    return scales[row % kCodeBlock];
  }

  void set(const CodeSpace& space, std::int64_t at, const float* row) {
    const std::int64_t dims = space.dims();
    float peak = 0.0f;
    for (std::int64_t d = 0; d < dims; ++d) {
      peak = std::max(peak, std::fabs((row[d] - space.center()[d]) / space.width(d)));
    }
    const float inverse = peak > 0.0f ? kLargestCode / peak : 0.0f;
    for (std::int64_t d = 0; d < quads_ * kQuad; ++d) {
      const float value =
          d < dims ? (row[d] - space.center()[d]) / space.width(d) * inverse : 0.0f;
      code(at, d) = static_cast<std::uint8_t>(std::lrint(value) + kZeroCode);
    }
    scale(at) = peak / kLargestCode;
  }

  Arena* arena_;  // frees the chunks
  Array<std::uint8_t*> chunks_;
  std::int64_t quads_ = 0, chunk_blocks_ = 1;
  std::size_t chunk_bytes_ = 0;
  std::int64_t size_ = 0;
};

}  // namespace kvp::index
