// The hot set: slots of a request's pages that hold fetched tokens.
//
//   hot slots     [ 17 | 4 | 230 | 9 ]      wanted: 9 230 51 88
//   unwanted        17   4                  missing: 51 88
//   afterwards    [ 51 | 88 | 230 | 9 ]     copied from the host: 51 88
//
// Wanted tokens that are resident keep their slots and are not copied. The missing
// ones fill unwanted slots from the first on, the best token first.
//
// The same with whole pages of the host: a page takes as many slots as it has tokens,
// wherever these are, and is read at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvp/page_copy.hpp"
#include "kvp/quantized_rows.hpp"

namespace kvp {

// Host pages: [2 (keys, values), page_tokens, head_dim] elements, without gaps.
// Token t of a KV head is slot t % page_tokens of page table[t / page_tokens].
template <typename Element>
struct HostTokens {
  const Element* pages;
  const std::int64_t* table;
  std::int64_t page_tokens;
  std::int64_t head_dim;
  // Rows of a page are elements, next to each other.
  static constexpr bool kInPlace = true;

  // Row of a token's key among all rows. The row of its value is page_tokens later.
  std::int64_t row(std::int64_t token) const {
    return table[token / page_tokens] * 2 * page_tokens + token % page_tokens;
  }
  const Element* key(std::int64_t token) const { return pages + row(token) * head_dim; }
  const Element* value(std::int64_t token) const {
    return key(token) + page_tokens * head_dim;
  }
};

// Host pages of quantized rows: [2 (keys, values), page_tokens] rows, without gaps.
// key() and value() return the elements in a buffer that the next call overwrites.
template <typename Element>
class QuantizedTokens {
 public:
  // `tokens` has the pages in bytes, and rows.row_bytes() as head_dim.
  QuantizedTokens(const HostTokens<std::uint8_t>& tokens, const QuantizedRows& rows)
      : head_dim(rows.format.head_dim),
        tokens_(tokens),
        rows_(rows),
        wide_(static_cast<std::size_t>(head_dim)),
        row_(static_cast<std::size_t>(head_dim)) {}

  const Element* key(std::int64_t token) { return read(tokens_.key(token)); }
  const Element* value(std::int64_t token) { return read(tokens_.value(token)); }

  const std::int64_t head_dim;
  static constexpr bool kInPlace = false;

 private:
  const Element* read(const std::uint8_t* row) {
    rows_.read(row, wide_.data());
    narrow_row(wide_.data(), head_dim, row_.data());
    return row_.data();
  }

  HostTokens<std::uint8_t> tokens_;
  QuantizedRows rows_;
  std::vector<float> wide_;
  std::vector<Element> row_;
};

// The hot slots of one (request, KV head): their places and their tokens, or pages of tokens.
struct HotSlots {
  std::int64_t* token;  // [n], numbers of host tokens, distinct, or of host pages
  const std::int64_t* page;  // [n * unit], pages of the heap
  const std::int64_t* slot;  // [n * unit]
  std::int64_t n;
  std::int64_t unit = 1;  // tokens per entry

  // Whether the slots of an entry are next to each other in one page.
  bool is_run(std::int64_t entry) const {
    const std::int64_t first = entry * unit;
    for (std::int64_t i = first + 1; i < first + unit; ++i) {
      if (page[i] != page[first] || slot[i] != slot[first] + (i - first)) return false;
    }
    return true;
  }
};

// Assigns hot slots to wanted tokens, as many as fit; negative entries are ignored.
// Updates hot.token and calls swap(place, token) for every token to copy. Returns the
// number of these calls. If entry i of wanted, or entry i - num_wanted of hot.token, is
// not a token of the host, returns -1 - i and writes nothing.
//
//   capacity: tokens of the host
//   Entries of pages may be -1, which is replaced like an unwanted page.
//   mark: one entry per host token, all zero; zero again afterwards
template <typename Swap>
std::int64_t swap_hot_slots(std::int64_t capacity, const std::int64_t* wanted,
                            std::int64_t num_wanted, const HotSlots& hot,
                            std::vector<std::uint8_t>& mark, const Swap& swap) {
  constexpr std::uint8_t kWanted = 1, kHot = 2;
  num_wanted = std::min(num_wanted, hot.n);
  for (std::int64_t i = 0; i < num_wanted; ++i) {
    if (wanted[i] >= capacity) return -1 - i;
  }
  for (std::int64_t i = 0; i < hot.n; ++i) {
    const bool exists = hot.token[i] >= 0 && hot.token[i] < capacity;
    if (!exists && !(hot.unit > 1 && hot.token[i] == -1)) return -1 - num_wanted - i;
  }
  const auto at = [&mark](std::int64_t token) -> std::uint8_t& {
    return mark[static_cast<std::size_t>(token)];
  };
  for (std::int64_t i = 0; i < num_wanted; ++i) {
    if (wanted[i] >= 0) at(wanted[i]) |= kWanted;
  }
  for (std::int64_t i = 0; i < hot.n; ++i) {
    if (hot.token[i] >= 0) at(hot.token[i]) |= kHot;
  }
  const auto is_wanted = [&](std::int64_t token) {
    return token >= 0 && (at(token) & kWanted);
  };
  std::int64_t place = 0, swapped = 0;
  for (std::int64_t i = 0; i < num_wanted; ++i) {
    const std::int64_t token = wanted[i];
    if (token < 0 || (at(token) & kHot)) continue;
    while (is_wanted(hot.token[place])) ++place;  // exists, because n >= num_wanted
    if (hot.token[place] >= 0) at(hot.token[place]) = 0;
    at(token) |= kHot;
    hot.token[place] = token;
    swap(place, token);
    ++swapped;
  }
  for (std::int64_t i = 0; i < num_wanted; ++i) {
    if (wanted[i] >= 0) at(wanted[i]) = 0;
  }
  for (std::int64_t i = 0; i < hot.n; ++i) {
    if (hot.token[i] >= 0) at(hot.token[i]) = 0;
  }
  return swapped;
}

// Like swap_hot_slots, and copies the tokens from the host into the pages. `host` is a
// HostTokens or QuantizedTokens.
template <typename Host, typename Element>
std::int64_t fill_hot_slots(Host& host, std::int64_t capacity,
                            const std::int64_t* wanted, std::int64_t num_wanted,
                            const HotSlots& hot, const PagedKV<Element>& kv,
                            std::vector<std::uint8_t>& mark) {
  const auto copy = [&](std::int64_t place, std::int64_t number) {
    const std::int64_t size = kv.block_size(), unit = hot.unit;
    if constexpr (Host::kInPlace) {
      if (hot.is_run(place)) {  // as slots often are
        Element* page = kv.page(hot.page[place * unit]);
        const std::int64_t slot = hot.slot[place * unit], first = number * unit;
        store_rows(page, kv.layout.keys, slot, unit, size, host.head_dim,
                   host.key(first));
        store_rows(page, kv.layout.values, slot, unit, size, host.head_dim,
                   host.value(first));
        return;
      }
    }
    for (std::int64_t i = 0; i < unit; ++i) {
      Element* page = kv.page(hot.page[place * unit + i]);
      const std::int64_t slot = hot.slot[place * unit + i], token = number * unit + i;
      store_row(page, kv.layout.keys, slot, size, host.head_dim, host.key(token));
      store_row(page, kv.layout.values, slot, size, host.head_dim, host.value(token));
    }
  };
  return swap_hot_slots(capacity, wanted, num_wanted, hot, mark, copy);
}

}  // namespace kvp
