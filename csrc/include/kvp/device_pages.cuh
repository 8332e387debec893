// Pages of a heap on the device, as kernels get to know them.
#pragma once

#include <cstdint>

namespace kvp::cuda {

struct DeviceHeap {
  std::int64_t num_pages;
  std::int64_t page_stride;  // elements
};

// Rows of head_dim elements, slot_stride apart; 0: the elements lie elsewhere.
struct DeviceRows {
  std::int64_t base;
  std::int64_t slot_stride;
};

}  // namespace kvp::cuda
