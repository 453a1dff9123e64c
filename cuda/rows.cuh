// rows.cuh: the rows that travel: their words at the source, their addresses at a destination.
//
// A row at a destination is `row_bytes` (whole sectors) and is written in 16-byte vectors; what the source does not
// fill is zero. Rows that are no whole aligned vectors at the source are read in words, or in bytes.
#pragma once

#include "sync.cuh"

// Word `byte / 4` of a row whose parts start anywhere: part of the row, its tail, or zero.
static __device__ __noinline__ uint32_t ld_row_bytes(const RowSource& s, const char* row, uint32_t token,
                                                     uint32_t byte) {
  if (byte >= s.num_bytes) {
    const bool is_tail = s.tail && byte == s.num_bytes;
    return is_tail ? float_to_bits(s.tail[static_cast<uint64_t>(token) * s.tail_stride]) : 0;
  }
  uint32_t word = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < 4 && byte + i < s.num_bytes; ++i) {
    word |= static_cast<uint32_t>(static_cast<uint8_t>(row[byte + i])) << 8 * i;
  }
  return word;
}

// Word `index` of a token's row, from the rank's own tensors.
__device__ __forceinline__ uint32_t ld_row_word(const RowSource& s, uint32_t token, uint32_t index) {
  const char* row = static_cast<const char*>(s.rows) + static_cast<uint64_t>(token) * s.num_bytes;
  const uint32_t byte = 4 * index;
  if (s.align_bytes < 4) return ld_row_bytes(s, row, token, byte);
  const void* at = byte < s.num_bytes ? row + byte
                   : byte == s.num_bytes && s.tail
                       ? static_cast<const void*>(s.tail + static_cast<uint64_t>(token) * s.tail_stride)
                       : nullptr;
  return at ? *static_cast<const uint32_t*>(at) : 0;
}

// Vector `index` of a row that is no whole aligned vectors.
static __device__ __noinline__ Vector ld_row_narrow(const RowSource& s, uint32_t token, uint32_t index) {
  Vector v;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) v.words[i] = ld_row_word(s, token, 4 * index + i);
  return v;
}

// Vector `index` of a token's row.
__device__ __forceinline__ Vector ld_row_vector(const RowSource& s, uint32_t token, uint32_t index) {
  const char* row = static_cast<const char*>(s.rows) + static_cast<uint64_t>(token) * s.num_bytes;
  const bool is_whole = s.align_bytes == kVectorBytes && (index + 1) * kVectorBytes <= s.num_bytes;
  return is_whole ? reinterpret_cast<const Vector*>(row)[index] : ld_row_narrow(s, token, index);
}

// Address of a row in the plane [source rank, max_tokens, row_bytes] at `offset`, in the channel at `peer`.
__device__ __forceinline__ char* row_in(const Channel& c, uint64_t peer, uint64_t offset, uint32_t row_bytes,
                                        uint32_t source, uint32_t token) {
  const uint64_t row = static_cast<uint64_t>(source) * c.max_tokens + token;
  return reinterpret_cast<char*>(peer) + offset + row * row_bytes;
}
__device__ __forceinline__ char* row_at(const Channel& c, uint32_t owner, uint64_t offset, uint32_t row_bytes,
                                        uint32_t source, uint32_t token) {
  return row_in(c, c.peers[owner], offset, row_bytes, source, token);
}

__device__ __forceinline__ uint32_t* token_mask(const Channel& c, uint32_t token) {
  return reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(c.state) + c.masks_offset) +
         static_cast<uint64_t>(token) * c.mask_words;
}
__device__ __forceinline__ uint32_t* bitmap_at(const Channel& c, uint32_t owner, uint32_t source) {
  return reinterpret_cast<uint32_t*>(c.peers[owner] + c.bitmap_offset) + static_cast<uint64_t>(source) * c.bitmap_words;
}

// Whether a token below its source's count was received in this round.
__device__ __forceinline__ bool row_is_valid(const Channel& c, uint32_t source, uint32_t token) {
  return ld_word(bitmap_at(c, c.rank, source) + token / 32) >> token % 32 & 1;
}

// Calls f(rank) for every rank of a mask in ascending order.
template <class F>
__device__ __forceinline__ void each_rank(const uint32_t* mask, uint32_t mask_words, F f) {
  for (uint32_t w = 0; w < mask_words; ++w) {
    for (uint32_t bits = ld_word(mask + w); bits; bits &= bits - 1) f(w * 32 + __ffs(bits) - 1);
  }
}
