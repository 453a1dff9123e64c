// abi.cu: what this library was compiled with, so that Python can refuse a library that does not match it.
#include <stddef.h>

#include "ptx.cuh"

namespace {

#define STRUCT(name) #name, sizeof(name)
#define FIELD(name, field) #name "." #field, offsetof(name, field)

struct Entry {
  const char* name;
  size_t value;
};

constexpr Entry kEntries[] = {
    {STRUCT(ChannelState)},
    {FIELD(ChannelState, half_rounds)},
    {FIELD(ChannelState, sticky)},
    {FIELD(ChannelState, bad_routing)},
    {FIELD(ChannelState, timeout_ns)},
    {FIELD(ChannelState, first_timeout_ns)},
    {FIELD(ChannelState, send_counter)},
    {FIELD(ChannelState, pull_counter)},
    {FIELD(ChannelState, num_tokens)},
    {FIELD(ChannelState, num_failures)},
    {FIELD(ChannelState, reserved)},
    {STRUCT(Status)},
    {FIELD(Status, failure)},
    {FIELD(Status, phase)},
    {FIELD(Status, culprit)},
    {FIELD(Status, late_in)},
    {FIELD(Status, reported_by)},
    {FIELD(Status, reserved)},
    {FIELD(Status, epoch_wanted)},
    {FIELD(Status, epoch_seen)},
    {FIELD(Status, waited_ns)},
    {STRUCT(InputRecord)},
    {FIELD(InputRecord, present)},
    {FIELD(InputRecord, token)},
    {FIELD(InputRecord, position)},
    {FIELD(InputRecord, value)},
    {FIELD(InputRecord, limit)},
    {FIELD(InputRecord, reserved)},
    {STRUCT(Channel)},
    {FIELD(Channel, peers)},
    {FIELD(Channel, state)},
    {FIELD(Channel, status)},
    {FIELD(Channel, inputs)},
    {FIELD(Channel, rank)},
    {FIELD(Channel, num_ranks)},
    {FIELD(Channel, max_tokens)},
    {FIELD(Channel, bitmap_words)},
    {FIELD(Channel, mask_words)},
    {FIELD(Channel, flag_parts)},
    {FIELD(Channel, num_experts)},
    {FIELD(Channel, reserved)},
    {FIELD(Channel, dispatch_flags_offset)},
    {FIELD(Channel, end_flags_offset)},
    {FIELD(Channel, abort_words_offset)},
    {FIELD(Channel, bitmap_offset)},
    {FIELD(Channel, source_counts_offset)},
    {FIELD(Channel, masks_offset)},
    {STRUCT(Plane)},
    {FIELD(Plane, offset)},
    {FIELD(Plane, row_bytes)},
    {FIELD(Plane, tile_offset)},
    {STRUCT(Divisor)},
    {FIELD(Divisor, multiplier)},
    {FIELD(Divisor, shift)},
    {STRUCT(RowSource)},
    {FIELD(RowSource, rows)},
    {FIELD(RowSource, tail)},
    {FIELD(RowSource, num_bytes)},
    {FIELD(RowSource, align_bytes)},
    {FIELD(RowSource, tail_stride)},
    {FIELD(RowSource, reserved)},
    {STRUCT(DispatchParams)},
    {FIELD(DispatchParams, struct_bytes)},
    {FIELD(DispatchParams, num_planes)},
    {FIELD(DispatchParams, num_rows)},
    {FIELD(DispatchParams, top_k)},
    {FIELD(DispatchParams, experts_per_rank)},
    {FIELD(DispatchParams, num_longer_ranks)},
    {FIELD(DispatchParams, per_longer_rank)},
    {FIELD(DispatchParams, per_rank)},
    {FIELD(DispatchParams, phased)},
    {FIELD(DispatchParams, num_ctas)},
    {FIELD(DispatchParams, shares_log2)},
    {FIELD(DispatchParams, share_ranks)},
    {FIELD(DispatchParams, flags_apart)},
    {FIELD(DispatchParams, num_threads)},
    {FIELD(DispatchParams, shared_bytes)},
    {FIELD(DispatchParams, waits)},
    {FIELD(DispatchParams, ids_plane)},
    {FIELD(DispatchParams, whole_planes)},
    {FIELD(DispatchParams, narrow_planes)},
    {FIELD(DispatchParams, is_large)},
    {FIELD(DispatchParams, topk_ids)},
    {FIELD(DispatchParams, num_tokens)},
    {FIELD(DispatchParams, channel)},
    {FIELD(DispatchParams, planes)},
    {FIELD(DispatchParams, sources)},
    {STRUCT(WaitParams)},
    {FIELD(WaitParams, struct_bytes)},
    {FIELD(WaitParams, phase)},
    {FIELD(WaitParams, signals)},
    {FIELD(WaitParams, waits)},
    {FIELD(WaitParams, channel)},
    {STRUCT(OutboxParams)},
    {FIELD(OutboxParams, struct_bytes)},
    {FIELD(OutboxParams, num_ctas)},
    {FIELD(OutboxParams, num_threads)},
    {FIELD(OutboxParams, hidden)},
    {FIELD(OutboxParams, number)},
    {FIELD(OutboxParams, num_rows)},
    {FIELD(OutboxParams, outbox_offset)},
    {FIELD(OutboxParams, outbox_row_bytes)},
    {FIELD(OutboxParams, coding)},
    {FIELD(OutboxParams, scales_offset)},
    {FIELD(OutboxParams, row_scale_offset)},
    {FIELD(OutboxParams, rows)},
    {FIELD(OutboxParams, out)},
    {FIELD(OutboxParams, channel)},
    {STRUCT(RowTarget)},
    {FIELD(RowTarget, rows)},
    {FIELD(RowTarget, num_bytes)},
    {FIELD(RowTarget, align_bytes)},
    {STRUCT(RouteParams)},
    {FIELD(RouteParams, struct_bytes)},
    {FIELD(RouteParams, num_segments)},
    {FIELD(RouteParams, words_per_segment)},
    {FIELD(RouteParams, top_k)},
    {FIELD(RouteParams, first_expert)},
    {FIELD(RouteParams, num_experts)},
    {FIELD(RouteParams, ids_plane)},
    {FIELD(RouteParams, pad_multiple)},
    {FIELD(RouteParams, group_rows)},
    {FIELD(RouteParams, num_slots)},
    {FIELD(RouteParams, num_ctas)},
    {FIELD(RouteParams, num_threads)},
    {FIELD(RouteParams, segment_starts)},
    {FIELD(RouteParams, counter)},
    {FIELD(RouteParams, counts)},
    {FIELD(RouteParams, expert_offsets)},
    {FIELD(RouteParams, row_index)},
    {FIELD(RouteParams, k)},
    {FIELD(RouteParams, weights)},
    {FIELD(RouteParams, global_scale)},
    {FIELD(RouteParams, pair_slots)},
    {FIELD(RouteParams, topk_ids)},
    {FIELD(RouteParams, channel)},
    {FIELD(RouteParams, planes)},
    {FIELD(RouteParams, targets)},
    {STRUCT(OrderParams)},
    {FIELD(OrderParams, struct_bytes)},
    {FIELD(OrderParams, num_ctas)},
    {FIELD(OrderParams, num_threads)},
    {FIELD(OrderParams, hidden)},
    {FIELD(OrderParams, top_k)},
    {FIELD(OrderParams, rows_number)},
    {FIELD(OrderParams, to_number)},
    {FIELD(OrderParams, to_row_bytes)},
    {FIELD(OrderParams, pair_slots)},
    {FIELD(OrderParams, weights)},
    {FIELD(OrderParams, rows)},
    {FIELD(OrderParams, to)},
    {FIELD(OrderParams, channel)},
    {STRUCT(ExpertMatrix)},
    {FIELD(ExpertMatrix, codes)},
    {FIELD(ExpertMatrix, scales)},
    {FIELD(ExpertMatrix, global_scale)},
    {FIELD(ExpertMatrix, bias)},
    {FIELD(ExpertMatrix, num_rows)},
    {FIELD(ExpertMatrix, num_columns)},
    {FIELD(ExpertMatrix, bias_number)},
    {FIELD(ExpertMatrix, reserved)},
    {STRUCT(ExpertsParams)},
    {FIELD(ExpertsParams, struct_bytes)},
    {FIELD(ExpertsParams, num_ctas)},
    {FIELD(ExpertsParams, coding)},
    {FIELD(ExpertsParams, number)},
    {FIELD(ExpertsParams, weights_coding)},
    {FIELD(ExpertsParams, intermediate_coding)},
    {FIELD(ExpertsParams, curve)},
    {FIELD(ExpertsParams, num_matrices)},
    {FIELD(ExpertsParams, gate_row)},
    {FIELD(ExpertsParams, up_row)},
    {FIELD(ExpertsParams, row_step)},
    {FIELD(ExpertsParams, to_number)},
    {FIELD(ExpertsParams, alpha)},
    {FIELD(ExpertsParams, beta)},
    {FIELD(ExpertsParams, limit)},
    {FIELD(ExpertsParams, reserved)},
    {FIELD(ExpertsParams, intermediate)},
    {FIELD(ExpertsParams, to)},
    {FIELD(ExpertsParams, to_strides)},
    {FIELD(ExpertsParams, w13)},
    {FIELD(ExpertsParams, w2)},
    {FIELD(ExpertsParams, route)},
    {STRUCT(QuantParams)},
    {FIELD(QuantParams, struct_bytes)},
    {FIELD(QuantParams, number)},
    {FIELD(QuantParams, coding)},
    {FIELD(QuantParams, num_rows)},
    {FIELD(QuantParams, hidden)},
    {FIELD(QuantParams, given_scale)},
    {FIELD(QuantParams, scale_stride)},
    {FIELD(QuantParams, reserved)},
    {FIELD(QuantParams, values)},
    {FIELD(QuantParams, codes)},
    {FIELD(QuantParams, scales)},
    {FIELD(QuantParams, global_scale)},
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
