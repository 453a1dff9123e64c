// abi.h: every struct and entry point that crosses to Python. `ep_a2a/native.py` mirrors it; a test compares both.
//
// Offsets and strides come from `ep_a2a/layout.py`; nothing here or in a kernel computes one.
// An entry point takes one struct and a stream, launches, and returns 0 or the CUDA error of the launch.
#pragma once

#include <stdint.h>

#if defined(__cplusplus)
#define EP_A2A_API extern "C" __attribute__((visibility("default")))
#endif

constexpr int kMaxRanks = 128;
constexpr int kMaxTopK = 32;
constexpr int kMaxPlanes = 8;
constexpr int kVectorBytes = 16;
constexpr int kMaxSharedBytes = 204800;  // of a CTA
constexpr int kTileTokens = 8;           // of a dispatch tile: a byte of the bitmap
constexpr int kTileStart = 1664;         // of a dispatch tile's rows in shared memory
constexpr int kExpertTileRows = 8;       // slots that an expert's first product takes at a time

enum Phase : uint32_t { kPhaseDispatch = 1, kPhaseCombine = 2, kPhaseRelease = 3 };
enum Failure : uint32_t { kHealthy = 0, kPeerTimeout = 1, kChannelMisuse = 2, kRoundMismatch = 3, kPeerLeft = 4 };
enum BadInput : uint32_t { kInvalidRouting = 0, kInvalidCount = 1, kCapacityExceeded = 2, kNumBadInputs = 3 };
enum Number : uint32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };
enum Coding : uint32_t { kPlain = 0, kNvfp4 = 1, kMxfp4 = 2, kFp8 = 3, kMxfp8 = 4 };  // how values are encoded
enum Curve : uint32_t { kSigmoid = 0, kGeluTanh = 1, kSquare = 2 };  // of an activation: x sigmoid(alpha x), ...

// Memory of one rank and channel that no peer sees; at the start of the channel's state. Kernels of the channel's
// stream order read and write it; the host writes the two deadlines only.
struct ChannelState {
  uint64_t half_rounds;       // even = closed, odd = open; the epoch of an open round is half_rounds / 2 + 1
  uint64_t sticky;            // the abort word that ended this channel for ever; 0 = healthy
  uint64_t bad_routing;       // smallest token << 40 | position << 32 | id, of ids out of range this round; ~0 = none
  uint64_t timeout_ns;        // deadline of a wait
  uint64_t first_timeout_ns;  // the same in epoch 1
  uint32_t send_counter;      // CTAs of the running dispatch that are done, or have started (flags_apart)
  uint32_t pull_counter;      // CTAs of the running combine that are done
  int32_t num_tokens;         // tokens of this rank in the open round
  uint32_t num_failures;      // kernels that ended this channel; the first one writes the status
  uint8_t reserved[72];
};

// Why a channel died. In host memory that the device can write; `failure` is stored last, and once.
struct Status {
  uint32_t failure;      // enum Failure
  uint32_t phase;        // enum Phase: what this rank was doing
  uint32_t culprit;      // the rank that is late or misused its channel
  uint32_t late_in;      // enum Phase: what the culprit did not finish
  uint32_t reported_by;  // the rank that found out: this rank itself, or another that told
  uint32_t reserved;
  uint64_t epoch_wanted;
  uint64_t epoch_seen;  // of the culprit's flag; valid if this rank found out
  uint64_t waited_ns;
};

// An input that a kernel had to correct, one record for each BadInput, so that none hides another. In host memory;
// written while `present` is 0, cleared by the host.
struct InputRecord {
  uint32_t present;
  int32_t token;     // kInvalidRouting; kCapacityExceeded: the crowded expert, -1 = all of them together
  int32_t position;  // kInvalidRouting: which of the token's ids
  int32_t value;     // the id or count found, or the slots needed
  int32_t limit;     // num_experts, T, or the slots there are
  int32_t reserved;
};

// What every kernel of a channel knows.
struct Channel {
  const uint64_t* peers;  // [num_ranks] address of this channel in each rank's region, own rank included
  ChannelState* state;
  Status* status;
  InputRecord* inputs;  // [kNumBadInputs]
  uint32_t rank;
  uint32_t num_ranks;
  uint32_t max_tokens;
  uint32_t bitmap_words;  // per source rank
  uint32_t mask_words;    // per token
  uint32_t flag_parts;    // dispatch flags of a source: 8, 4 or 2, all in at most 64 words; 1 for more than 32 ranks
  uint32_t num_experts;
  uint32_t reserved;
  uint64_t dispatch_flags_offset;  // u64 [source rank, flag_parts], on a multiple of 16 bytes
  uint64_t end_flags_offset;       // u64 [source rank]
  uint64_t abort_words_offset;     // u64 [source rank]
  uint64_t bitmap_offset;          // u32 [source rank, bitmap_words]
  uint64_t source_counts_offset;   // in the state: i32 [source rank]
  uint64_t masks_offset;           // in the state: u32 [max_tokens, mask_words]
};

// One plane.
struct Plane {
  uint64_t offset;       // of [source rank, max_tokens, row_bytes] in a channel
  uint32_t row_bytes;    // a multiple of 32
  uint32_t tile_offset;  // phased: of its rows in a tile, for each token of the tile
};

// n / d of any n below 2^31 is n * multiplier >> shift.
struct Divisor {
  uint32_t multiplier;
  uint32_t shift;
};

// Where the rows of a plane come from on the sending rank.
struct RowSource {
  const void* rows;      // [T, num_bytes], contiguous
  const float* tail;     // a word behind each row, or null
  uint32_t num_bytes;    // of a row, without the tail
  uint32_t align_bytes;  // 16, 8, 4, 2 or 1: every row starts at a multiple of it
  uint32_t tail_stride;  // in floats: 0 = one word for all rows
  uint32_t reserved;
};

struct DispatchParams {
  uint32_t struct_bytes;
  uint32_t num_planes;
  uint32_t num_rows;  // T: rows in the sources
  uint32_t top_k;
  uint32_t experts_per_rank;  // the first num_longer_ranks own one more
  uint32_t num_longer_ranks;
  Divisor per_longer_rank;  // experts_per_rank + 1
  Divisor per_rank;         // experts_per_rank; any, where no rank owns so few
  uint32_t phased;          // 1 = phased schedule, 0 = general
  uint32_t num_ctas;        // a multiple of the shares
  uint32_t shares_log2;     // a CTA sends to ranks r with r % 2^shares_log2 == its number in it; at most 5
  uint32_t share_ranks;     // bit r % 32: rank r is of the first share
  uint32_t flags_apart;     // phased: 1 = each CTA raises flags of its own; then at most flag_parts of a share
  uint32_t num_threads;
  uint32_t shared_bytes;      // of a CTA: kTileStart, and phased the rows of a tile, at least
  uint32_t waits;             // 1 = the last CTA waits for the rows of all peers
  uint32_t ids_plane;         // planes of the payload are before it, weights follow it
  uint32_t whole_planes;      // bit i: the rows of plane i are, bytes and alignment, what a destination gets
  uint32_t narrow_planes;     // bit i: they are not, and not ids, weights, or encoded here
  uint32_t is_large;          // 1 = the round fills a cache: what is read leaves it first
  uint32_t coding;            // phased: enum Coding in which planes 0 and 1 are made of the numbers at source 0
  uint32_t number;            // enum Number: of those
  const int32_t* topk_ids;    // [T, top_k] global expert, -1 = not routed
  const int32_t* num_tokens;  // device count in [0, T], or null = T
  Channel channel;
  Plane planes[kMaxPlanes];
  RowSource sources[kMaxPlanes];
};

struct WaitParams {
  uint32_t struct_bytes;
  uint32_t phase;    // enum Phase
  uint32_t signals;  // 1 = tells the peers that this rank ends the round
  uint32_t waits;    // 1 = waits for all peers
  Channel channel;
};

struct OutboxParams {
  uint32_t struct_bytes;
  uint32_t num_ctas;
  uint32_t num_threads;
  uint32_t hidden;
  uint32_t number;         // enum Number: of `rows` / `out`, and of an outbox row that is not encoded
  uint32_t num_rows;       // combine: T, rows of `out`
  uint64_t outbox_offset;  // [source rank, max_tokens, outbox_row_bytes] in a channel
  uint32_t outbox_row_bytes;
  uint32_t coding;            // enum Coding: of an outbox row, whose codes come first
  uint32_t scales_offset;     // in an encoded row: its scales, a multiple of 4
  uint32_t row_scale_offset;  // in an encoded row: the fp32 scale of the whole row, if the coding has one
  const void* rows;           // stage: [num_ranks, max_tokens, hidden]
  void* out;                  // combine: [T, hidden]
  Channel channel;
};

// Where the rows of a plane are gathered.
struct RowTarget {
  void* rows;            // [num_slots, num_bytes], contiguous
  uint32_t num_bytes;    // of a row
  uint32_t align_bytes;  // 16, 8, 4, 2 or 1: every row starts at a multiple of it
};

// Pairs (received row, expert of this rank) are put into slots, grouped by expert. Experts count from the rank's first.
struct RouteParams {
  uint32_t struct_bytes;
  uint32_t num_segments;       // runs of bitmap words over all sources, a warp each
  uint32_t words_per_segment;  // the last one may have fewer
  uint32_t top_k;
  uint32_t first_expert;
  uint32_t num_experts;   // of this rank
  uint32_t ids_plane;     // planes of the payload are before it, weights follow it
  uint32_t pad_multiple;  // group_rows = 0: slots of a group are a multiple of this
  uint32_t group_rows;    // slots of each group; 0 = as many as its pairs need
  uint32_t num_slots;
  uint32_t num_ctas;  // of gather
  uint32_t num_threads;
  uint32_t* segment_starts;  // [num_experts, num_segments]: pairs of a segment, then of all segments before it
  uint32_t* counter;         // CTAs of the running scan that are done
  uint32_t* counts;          // [num_experts] pairs; with slots: pairs that have one
  uint32_t* expert_offsets;  // [num_experts + 1] start of each group, at most num_slots; null = count only
  int32_t* row_index;        // [num_slots] source * max_tokens + token, -1 = no pair
  int32_t* k;                // [num_slots] which of the token's ids, -1 = no pair
  float* weights;            // [num_slots] 0 = no pair
  float* global_scale;       // [num_slots] 0 = no pair; null where the payload has none
  int32_t* pair_slots;       // [num_ranks, max_tokens, top_k] at received rows: slot of the pair, -1 = none
  int32_t* topk_ids;         // ids: [num_ranks, max_tokens, top_k] global expert of this rank, else -1
  Channel channel;
  Plane planes[kMaxPlanes];
  RowTarget targets[kMaxPlanes];  // the first one without rows: nothing is gathered
};

struct OrderParams {  // results of received rows from the rows of their pairs
  uint32_t struct_bytes;
  uint32_t num_ctas;
  uint32_t num_threads;
  uint32_t hidden;
  uint32_t top_k;
  uint32_t rows_number;  // enum Number
  uint32_t to_number;    // enum Number
  uint32_t to_row_bytes;
  const int32_t* pair_slots;  // as in RouteParams
  const float* weights;       // [num_slots]
  const void* rows;           // [num_slots, hidden]
  void* to;                   // [num_ranks, max_tokens, to_row_bytes]: the rank's own outbox, or a place to encode from
  Channel channel;
};

// A matrix of each local expert in NVFP4 or MXFP4, two codes a byte, low nibble first; R rows of C columns.
struct ExpertMatrix {
  const uint8_t* codes;       // [num_experts, R, C / 2], on a multiple of 4 bytes
  const uint8_t* scales;      // [num_experts, R, C / block]
  const float* global_scale;  // [num_experts], or null
  const void* bias;           // [num_experts, R], or null
  uint32_t num_rows;
  uint32_t num_columns;
  uint32_t bias_number;  // enum Number
  uint32_t reserved;
};

struct ExpertsParams {  // I = w2.num_columns, H = w2.num_rows
  uint32_t struct_bytes;
  uint32_t num_ctas;
  uint32_t coding;               // enum Coding: of the payload
  uint32_t number;               // enum Number: of a payload that is not encoded
  uint32_t weights_coding;       // kNvfp4 or kMxfp4
  uint32_t intermediate_coding;  // kPlain: bf16; kNvfp4 or kMxfp4: fp32, encoded and decoded in place
  uint32_t curve;                // enum Curve
  uint32_t num_matrices;         // 2: w13 holds gate and up, 1: one matrix
  uint32_t gate_row;             // row of w13 that makes gate j: gate_row + j * row_step
  uint32_t up_row;
  uint32_t row_step;
  uint32_t to_number;  // enum Number
  float alpha;
  float beta;
  float limit;
  uint32_t reserved;
  void* intermediate;      // [route.num_slots, I]
  void* to;                // results of received rows: [num_ranks, max_tokens, H]
  uint64_t to_strides[3];  // in numbers
  ExpertMatrix w13;
  ExpertMatrix w2;
  RouteParams route;  // with slots, as it was launched; groups are whole tiles of kExpertTileRows slots
};

struct QuantParams {
  uint32_t struct_bytes;
  uint32_t number;  // enum Number: of `values`
  uint32_t coding;  // enum Coding, not kPlain
  uint32_t num_rows;
  uint32_t hidden;        // a multiple of the coding's block
  uint32_t given_scale;   // encode: 1 = `global_scale` is read, 0 = it is computed and written
  uint32_t scale_stride;  // floats from a row's global scale to the next; 0 = one for all rows
  uint32_t reserved;
  void* values;         // [num_rows, hidden]: encode reads, decode writes
  uint8_t* codes;       // [num_rows, hidden / 2] e2m1, low nibble first, or [num_rows, hidden] e4m3
  void* scales;         // [num_rows, hidden / block] e4m3, ue8m0 or fp32
  float* global_scale;  // where the coding has one
};

EP_A2A_API int ep_a2a_dispatch_send(const DispatchParams* params, void* stream);
EP_A2A_API int ep_a2a_end(const WaitParams* params, void* stream);    // of a phase: its signal, its wait, or both
EP_A2A_API int ep_a2a_leave(const WaitParams* params, void* stream);  // tells the peers; the channel alone is used
EP_A2A_API int ep_a2a_outbox_stage(const OutboxParams* params, void* stream);
EP_A2A_API int ep_a2a_outbox_order(const OrderParams* params, void* stream);
EP_A2A_API int ep_a2a_combine_pull(const OutboxParams* params, void* stream);
EP_A2A_API int ep_a2a_route(const RouteParams* params, void* stream);
EP_A2A_API int ep_a2a_route_ids(const RouteParams* params, void* stream);
EP_A2A_API int ep_a2a_experts(const ExpertsParams* params, void* stream);
EP_A2A_API int ep_a2a_quant_encode(const QuantParams* params, void* stream);
EP_A2A_API int ep_a2a_quant_decode(const QuantParams* params, void* stream);
EP_A2A_API int ep_a2a_load();  // every kernel onto the current GPU, so that no later launch has to wait for that
EP_A2A_API uint64_t ep_a2a_capture_id(void* stream);  // of the capture that a stream is in; 0 = none
EP_A2A_API const char* ep_a2a_abi();                  // one line a struct or field: "name size" or "name.field offset"
EP_A2A_API const char* ep_a2a_error_text(int error);  // of a launcher's return value

// Host build only: at every access to a flag wait up to `max_us`, in `permille` of the cases, by `seed`; 0 = off.
EP_A2A_API void ep_a2a_host_delays(uint64_t seed, uint32_t permille, uint32_t max_us);
