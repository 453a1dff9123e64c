// abi.cu: what this library was compiled with, so that Python can refuse a library that does not match it.
#include <stddef.h>

#include "ptx.cuh"

namespace {

// An entry for a struct, and one for each of its fields: REST is expanded anew for each, up to 64 times.
#define FIRST(name, field, ...) \
  {#name "." #field, offsetof(name, field)} __VA_OPT__(, REST PARENTHESES(name, __VA_ARGS__))
#define REST() FIRST
#define PARENTHESES ()
#define EXPAND4(...) __VA_ARGS__
#define EXPAND3(...) EXPAND4(EXPAND4(EXPAND4(EXPAND4(__VA_ARGS__))))
#define EXPAND2(...) EXPAND3(EXPAND3(EXPAND3(EXPAND3(__VA_ARGS__))))
#define EXPAND1(...) EXPAND2(EXPAND2(EXPAND2(EXPAND2(__VA_ARGS__))))
#define STRUCT(name, ...) {#name, sizeof(name)}, EXPAND1(FIRST(name, __VA_ARGS__))

struct Entry {
  const char* name;
  size_t value;
};

constexpr Entry kEntries[] = {
    STRUCT(ChannelState, half_rounds, sticky, bad_routing, timeout_ns, first_timeout_ns, send_counter, pull_counter,
           num_tokens, num_failures, reserved),
    STRUCT(Status, failure, phase, culprit, late_in, reported_by, reserved, epoch_wanted, epoch_seen, waited_ns),
    STRUCT(InputRecord, present, token, position, value, limit, reserved),
    STRUCT(Channel, peers, state, status, inputs, rank, num_ranks, max_tokens, bitmap_words, mask_words, flag_parts,
           num_experts, reserved, dispatch_flags_offset, end_flags_offset, abort_words_offset, bitmap_offset,
           source_counts_offset, masks_offset),
    STRUCT(Plane, offset, row_bytes, tile_offset),
    STRUCT(Divisor, multiplier, shift),
    STRUCT(RowSource, rows, tail, num_bytes, align_bytes, tail_stride, reserved),
    STRUCT(DispatchParams, struct_bytes, num_planes, num_rows, top_k, experts_per_rank, num_longer_ranks,
           per_longer_rank, per_rank, phased, num_ctas, shares_log2, share_ranks, flags_apart, num_threads,
           shared_bytes, waits, ids_plane, whole_planes, narrow_planes, is_large, coding, number, topk_ids, num_tokens,
           channel, planes, sources),
    STRUCT(WaitParams, struct_bytes, phase, signals, waits, channel),
    STRUCT(OutboxParams, struct_bytes, num_ctas, num_threads, hidden, number, num_rows, outbox_offset, outbox_row_bytes,
           coding, scales_offset, row_scale_offset, rows, out, channel),
    STRUCT(RowTarget, rows, num_bytes, align_bytes),
    STRUCT(RouteParams, struct_bytes, num_segments, words_per_segment, top_k, first_expert, num_experts, ids_plane,
           pad_multiple, group_rows, num_slots, num_ctas, num_threads, segment_starts, counter, counts, expert_offsets,
           row_index, k, weights, global_scale, pair_slots, topk_ids, channel, planes, targets),
    STRUCT(OrderParams, struct_bytes, num_ctas, num_threads, hidden, top_k, rows_number, to_number, to_row_bytes,
           pair_slots, weights, rows, to, channel),
    STRUCT(ExpertMatrix, codes, scales, global_scale, bias, num_rows, num_columns, bias_number, reserved),
    STRUCT(ExpertsParams, struct_bytes, num_ctas, coding, number, weights_coding, intermediate_coding, curve,
           num_matrices, gate_row, up_row, row_step, to_number, alpha, beta, limit, reserved, intermediate, to,
           to_strides, w13, w2, route),
    STRUCT(QuantParams, struct_bytes, number, coding, num_rows, hidden, given_scale, scale_stride, reserved, values,
           codes, scales, global_scale),
};

struct Text {
  char characters[16384];
  size_t length = 0;
  void append(char c) {
    if (length + 1 < sizeof characters) characters[length++] = c;
  }
  void append(const char* text) {
    while (*text) append(*text++);
  }
  void append(size_t number) {
    if (number >= 10) append(number / 10);
    append(static_cast<char>('0' + number % 10));
  }
  Text() {
    for (const Entry& entry : kEntries) {
      append(entry.name);
      append(' ');
      append(entry.value);
      append('\n');
    }
    characters[length] = 0;
  }
};

}  // namespace

const char* ep_a2a_abi() {
  static const Text text;
  return text.characters;
}

const char* ep_a2a_error_text(int error) {
#if defined(__CUDACC__)
  return cudaGetErrorString(static_cast<cudaError_t>(error));
#else
  return error == 0 ? "no error" : "a host launch cannot fail";
#endif
}

int ep_a2a_load() {
#if defined(__CUDACC__)
  int device = 0, most_shared = 0;  // some GPUs have less than kMaxSharedBytes
  cudaError_t error = cudaGetDevice(&device);
  if (!error) error = cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int wanted = most_shared < kMaxSharedBytes ? most_shared : kMaxSharedBytes;
  for (const KernelNode* node = KernelNode::first; node && !error; node = node->next) {
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, node->kernel);
    if (error) break;
    const int dynamic_bytes = wanted - static_cast<int>(attributes.sharedSizeBytes);
    error = cudaFuncSetAttribute(node->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes);
  }
  return static_cast<int>(error);
#else
  return 0;
#endif
}

uint64_t ep_a2a_capture_id([[maybe_unused]] void* stream) {
  unsigned long long id = 0;
#if defined(__CUDACC__)
  cudaStreamCaptureStatus status;
  const cudaError_t error = cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id);
  if (error != cudaSuccess || status == cudaStreamCaptureStatusNone) id = 0;
#endif
  return id;
}
