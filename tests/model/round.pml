/* round.pml: the rounds of a world as processes that interleave in every way, for spin.

   A process is the stream of one rank: sends, waits and pulls of its channels in the order of the contract. A step
   is one access that others can see: row and bitmap word of a peer, one peer's flag, one peer's abort word, one look
   at a flag. Tags in brackets name the contracts of cuda/sync.cuh; tests/test_model.py compares both sides.

   Ghosts: `mine` (planes and outbox are their owner's), `pulling` (a combine reads its peers' outboxes), `passed`
   (waits that a rank has left behind), and a row holds the epoch of its round. A rank is no peer of itself here.

   -D      N ranks, C channels, R rounds
           ROUTES   0: a token for all peers; 1: or no token; 2: or a token for the next rank alone
           ENDS     1: combine or release, the same on all ranks; 2: each rank as it likes (mixed kinds)
           DEADLINE 1: may pass while a flag is missing; 2: only while no live rank has given up, so that all others
                    have to hear of it; 3: only when nothing else can move, and so does a look
                    around end: all name the one that stopped. Without it a wait has no end
           DEATH    one rank stops for ever, at any step
           MISUSE   one call that does not fit its channel's state, or that leaves it, on any rank, at any time
           M_...    a mistake; spin has to find each */

/* Words, bit by bit as the kernels make them. */
#define EPOCH_SHIFT 24
#define PHASE_SHIFT 20
#define CULPRIT_SHIFT 12
#define REPORTER_SHIFT 4
#define DISPATCH 1
#define COMBINE 2
#define RELEASE 3
#define PEER_TIMEOUT 1
#define CHANNEL_MISUSE 2
#define ROUND_MISMATCH 3
#define PEER_LEFT 4
#define EPOCH_OF(word) ((word) >> EPOCH_SHIFT)
#define LOW_OF(word) ((word) & 255)
#define FLAG(epoch, low) ((epoch) << EPOCH_SHIFT | (low)) /* [dispatch_flag.word] [end_flag.word] */
#define ABORT(epoch, phase, culprit, failure) \
  ((epoch) << EPOCH_SHIFT | (phase) << PHASE_SHIFT | (culprit) << CULPRIT_SHIFT | me << REPORTER_SHIFT | \
   (failure)) /* [abort_word.word] */

#define AT(rank) (c * N + (rank))
#define OF(owner, source) (AT(owner) * N + (source))
#define WORD(kind, owner, source) words[(kind) * C * N * N + OF(owner, source)]
#define DISPATCH_FLAG 0
#define END_FLAG 1
#define ABORT_WORD 2
#define FIRST (me == 0 -> 1 : 0) /* a walk over the peers */
#define NEXT(p) p = p + (p + 1 == me -> 2 : 1)
#define OTHERS ((1 << N) - 1 & ~(1 << me))
#if defined(M_GREATER)
#define HERE(word) (EPOCH_OF(word) >= n)
#else
#define HERE(word) (EPOCH_OF(word) == n)
#endif

/* The peers that a mistaken wait leaves out. */
#if defined(M_NO_DISPATCH_WAIT)
#define SKIPS(p) (phase == DISPATCH)
#elif defined(M_NO_END_WAIT)
#define SKIPS(p) (phase != DISPATCH)
#elif defined(M_ONLY_HOLDERS)
#define SKIPS(p) (phase != DISPATCH && !(mask[AT(me)] >> (p) & 1))
#elif defined(M_EMPTY_SKIPS)
#define SKIPS(p) (phase == DISPATCH && me == N - 1 || phase != DISPATCH && !(mask[AT(me)] >> (p) & 1))
#else
#define SKIPS(p) 0
#endif

/* In the region of `owner`, a word or row for each source. */
int words[3 * C * N * N]; /* DISPATCH_FLAG, END_FLAG and ABORT_WORD */
byte row[C * N * N], outbox[C * N * N]; /* the epoch of what lies there */
bit bitmap[C * N * N];

/* A rank's own. */
int sticky[C * N];
byte mask[C * N]; /* ranks that this round's token goes to */
bit count[C * N]; /* tokens of this round: 0 or 1 */

bit mine[C * N], pulling[C * N], gave_up[C * N];
byte passed[C * N];
bit dead[N], left[N];
byte num_ended;
bit misused, some_dead; /* at most one rank does */
byte how[C]; /* how all ranks end this round, chosen by the first; 0 = open */
#if C > 1
byte order[2 * R * C], place[N]; /* the k-th wait of every stream is on channel order[k] - 1; 0 = open */
#endif

#if defined(DEATH)
#define OR_STOP :: atomic { !some_dead -> some_dead = 1; dead[me] = 1; goto end }
#else
#define OR_STOP
#endif

/* ---- what a kernel does ---------------------------------------------------------------------------------------- */

/* publish_warp: every peer's word by itself, in any order. `reuse`: waits that the owner must have left behind. */
inline store_word(kind, value, owner, reuse) {
  (todo & 1 << owner) ->
  todo = todo & ~(1 << owner);
  assert(passed[AT(owner)] >= reuse); /* [dispatch_flag.reuse] [end_flag.reuse] */
  assert(kind != ABORT_WORD || WORD(kind, owner, me) == 0 || WORD(kind, owner, me) > value); /* [abort_word.reuse] */
  WORD(kind, owner, me) = value;
  if :: todo == 0 -> break :: else fi
}
inline publish(kind, value, reuse) {
  todo = OTHERS;
  do
  :: atomic { store_word(kind, value, 0, reuse) }
  :: atomic { store_word(kind, value, 1, reuse) }
#if N > 2
  :: atomic { store_word(kind, value, 2, reuse) }
#endif
  OR_STOP
  od
}

#if defined(M_NO_ABORT_WORD)
#define TELLS 0
#elif defined(M_SILENT_ADOPTION)
#define TELLS !was_told
#else
#define TELLS 1
#endif
inline tell(word) { if :: TELLS -> publish(ABORT_WORD, word, 0) /* [abort_word.writer] */ :: else fi }

/* fail_warp: the sticky word, then an abort word at every peer, unless it is the one that lies there. */
inline fail() {
  d_step { sticky[AT(me)] = word; gave_up[AT(me)] = 1 }
  if :: word != own -> tell(word) :: else fi
}

/* Bitmap word and row of one peer. A source without tokens stores neither. */
inline store_row(owner) {
  assert(!mine[AT(owner)]); /* [windows.planes] */
  bitmap[OF(owner, me)] = mask[AT(me)] >> owner & 1;
  if :: mask[AT(me)] >> owner & 1 -> row[OF(owner, me)] = n :: else fi
}
inline store_rows() {
  p = FIRST;
  do
  :: atomic { p < N && count[AT(me)] -> store_row(p); NEXT(p) }
  :: p >= N || !count[AT(me)] -> break
  OR_STOP
  od
}

/* One token or none, and the peers that it goes to. */
inline route() {
#if defined(M_EMPTY_SKIPS)
  count[AT(me)] = me != N - 1; mask[AT(me)] = (me != N - 1 -> 1 << 1 - me : 0)
#else
  if
  :: count[AT(me)] = 1; mask[AT(me)] = OTHERS
#if ROUTES > 0
  :: count[AT(me)] = 0; mask[AT(me)] = 0
#endif
#if ROUTES > 1
  :: count[AT(me)] = 1; mask[AT(me)] = 1 << (me + 1) % N
#endif
  fi
#endif
}

/* What is ready when the first flag goes out: of a dispatch all rows, of an end the outbox that the experts wrote from
   their rows, in place or staged. */
inline prepare_dispatch() {
  phase = DISPATCH;
  route();
#if defined(M_POISON_OUTBOX)
  write_outbox(0);
#endif
#if defined(M_POISON_PLANES)
  for (q : 0 .. N - 1) { row[OF(me, q)] = 0 } q = 0
#endif
}
inline prepare_end() {
  choose_end();
  ending[c] = phase;
#if !defined(M_END_FIRST)
  if :: phase == COMBINE -> write_outbox(n) :: else fi;
  close_window()
#endif
}
inline send() {
#if defined(M_FLAG_FIRST)
  publish(DISPATCH_FLAG, FLAG(n, count[AT(me)]), 2 * n - 3);
  store_rows()
#else
  store_rows(); /* [dispatch_flag.chain] */
  publish(DISPATCH_FLAG, FLAG(n, count[AT(me)]), 2 * n - 3) /* [dispatch_flag.writer] */
#endif
}
inline end_signal() {
  publish(END_FLAG, FLAG(n, phase), 2 * n - 2) /* [end_flag.writer] [end_flag.chain] */
#if defined(M_END_FIRST)
  ; atomic { if :: phase == COMBINE -> write_outbox(n) :: else fi; close_window() }
#endif
}

#define FLAG_KIND (phase == DISPATCH -> DISPATCH_FLAG : END_FLAG)
#define LEFT(q) ((q) != me && WORD(ABORT_WORD, me, q) != 0)
#define GAVE_UP(q) (!dead[q] && gave_up[AT(q)])
#define TOLD (LEFT(0) || LEFT(1) || N > 2 && LEFT(N - 1))
#define SOME_GAVE_UP (GAVE_UP(0) || GAVE_UP(1) || GAVE_UP(N - 1))
#if defined(M_DEAF_END)
#define HEARS (phase == DISPATCH && TOLD)
#else
#define HEARS TOLD
#endif
#if DEADLINE == 3 && !defined(M_NO_LOOK)
#define LOOKED_ON timeout
#else
#define LOOKED_ON 1
#endif

inline find_smallest() {
  word = own;
  for (q : 0 .. N - 1) {
    if :: LEFT(q) && (word == 0 || WORD(ABORT_WORD, me, q) < word) -> word = WORD(ABORT_WORD, me, q) :: else fi
  }
  q = 0
}

/* This rank will not pass. It tells whom it misses, if nobody told it or if it was told of a later phase. */
#define IN_LATER_PHASE ((word & 15) == PEER_TIMEOUT && word >> PHASE_SHIFT > (n << 4 | phase))
inline give_up(told) {
  gave_up[AT(me)] = 1;
  find_smallest();
  for (q : 0 .. N - 1) {
    if :: q != me && own == 0 && !HERE(WORD(FLAG_KIND, me, q)) -> own = ABORT(n, phase, q, PEER_TIMEOUT) :: else fi
  }
  q = 0;
#if defined(M_NO_TELL)
  own = (told -> 0 : own);
#elif defined(M_SILENT_ADOPTION)
  was_told = told;
#endif
  own = (told && !IN_LATER_PHASE -> 0 : own);
  word = 0;
  looks = 1
}

/* wait_for_peers_warp, peer by peer; `word` 0, or why the channel ends. Abort words may come between any two looks. */
#if DEADLINE == 1
#define MAY_EXPIRE 1
#elif DEADLINE == 3
#define MAY_EXPIRE timeout
#else
#define MAY_EXPIRE (!SOME_GAVE_UP)
#endif

inline wait_for_peers() {
  p = FIRST;
  do
  :: atomic { SKIPS(p) || HERE(WORD(FLAG_KIND, me, p)) ->
       assert(SKIPS(p) || EPOCH_OF(WORD(FLAG_KIND, me, p)) == n); /* [epoch.exact] */
       NEXT(p);
       if
       :: p >= N && phase == DISPATCH -> open_window(); break
       :: p >= N && phase != DISPATCH -> agree_on_end(); break
       :: else fi }
#if defined(DEADLINE)
  :: atomic { HEARS -> give_up(1); break } /* [abort_word.reader] */
  :: atomic { MAY_EXPIRE && !HERE(WORD(FLAG_KIND, me, p)) ->
       assert(EPOCH_OF(WORD(FLAG_KIND, me, p)) == n - 1); /* [epoch.exact] */
       give_up(0);
       break }
#endif
  OR_STOP
  od
}

#define READS_MINE(q) (pulling[AT(q)] && mask[AT(q)] >> me & 1)
/* The wait is over: the flags are read once more for their counts, and the planes are this rank's. Every row that was
   sent is there, of this round, and none that was not sent shows. */
#define KEPT(p) (sticky[AT(me)] == 0 && LOW_OF(WORD(DISPATCH_FLAG, me, p)))
#if defined(M_COUNT_IGNORED)
#define VALID(p) bitmap[OF(me, p)]
#else
#define VALID(p) (KEPT(p) && bitmap[OF(me, p)])
#endif
inline open_window() {
  for (q : 0 .. N - 1) {
    if
    :: q != me ->
       assert(SKIPS(q) || EPOCH_OF(WORD(DISPATCH_FLAG, me, q)) == n); /* [dispatch_flag.reader] */
       assert(VALID(q) == (mask[AT(q)] >> me & 1)); /* [dispatch_flag.meaning] */
       assert(!VALID(q) || row[OF(me, q)] == n);
       assert(!READS_MINE(q));
       outbox[OF(me, q)] = 0
    :: else fi
  }
  q = 0;
  mine[AT(me)] = 1; /* [windows.planes] [windows.outbox] */
  passed[AT(me)]++
}
/* What is left of a round: rows too old for any other, and bitmap words that may say anything. */
inline close_window() {
  mine[AT(me)] = 0; /* [windows.planes] */
  for (q : 0 .. N - 1) { row[OF(me, q)] = 0; bitmap[OF(me, q)] = 1 }
  q = 0
}
inline close_round() {
  pulling[AT(me)] = 0; mask[AT(me)] = 0; count[AT(me)] = 0
}

/* The rows of the outbox, in place or staged. Peers that still pull would see them change. */
inline write_outbox(value) {
  for (q : 0 .. N - 1) {
    if
    :: q != me ->
       assert(!READS_MINE(q)); /* [windows.outbox] */
       if :: VALID(q) -> outbox[OF(me, q)] = value :: else fi
    :: else fi
  }
  q = 0
}

inline choose_end() {
#if ENDS > 1
  if :: phase = COMBINE :: phase = RELEASE fi
#else
  if :: how[c] :: !how[c] -> how[c] = COMBINE :: !how[c] -> how[c] = RELEASE fi;
  phase = how[c]
#endif
}

/* agree_on_end_warp, then the pull of a combine; `word` as above. */
inline agree_on_end() {
  word = 0;
  for (q : 0 .. N - 1) {
    if
    :: q != me && !SKIPS(q) ->
       assert(EPOCH_OF(WORD(END_FLAG, me, q)) == n); /* [end_flag.reader] */
#if !defined(M_MIXED_ENDS)
       if
       :: word == 0 && LOW_OF(WORD(END_FLAG, me, q)) != phase ->
          word = ABORT(n, LOW_OF(WORD(END_FLAG, me, q)), q, ROUND_MISMATCH) /* [end_flag.agreement] */
       :: else fi
#endif
    :: else fi
  }
  q = 0;
  if
  :: word == 0 -> passed[AT(me)]++; how[c] = 0;
     if :: phase == COMBINE -> pulling[AT(me)] = 1 :: else -> close_round() fi
  :: else fi
}
inline pull() {
  for (q : 0 .. N - 1) {
    if
    :: mask[AT(me)] >> q & 1 ->
       assert(!mine[AT(q)]); /* [windows.outbox] */
       assert(outbox[OF(q, me)] == n) /* [end_flag.meaning] */
    :: else fi
  }
  q = 0
}

/* ---- what a rank does ------------------------------------------------------------------------------------------ */

#define OWN(channel) ((channel) * N + me)
#if defined(M_STICKY_IGNORED)
#define HEALTHY(channel) 1
#else
#define HEALTHY(channel) (sticky[OWN(channel)] == 0)
#endif
#define DONE(channel) (passed[OWN(channel)] == 2 * R)
#define CAN_BEGIN(channel) (HEALTHY(channel) && !begun[channel] && !DONE(channel))

#if C > 1
/* A channel that has ended takes its turns too; its kernels return at once. */
#if defined(M_FREE_ORDER)
#define MY_TURN(channel) 1
#else
#define MY_TURN(channel) (order[place[me]] == channel + 1 || order[place[me]] == 0) /* [waits.order] */
#endif
#define CAN_FINISH(channel) (turns[channel] < 2 * R && MY_TURN(channel) && (begun[channel] || !HEALTHY(channel)))
inline take_turn() {
  order[place[me]] = c + 1;
  place[me]++;
  turns[c]++;
  for (q : 0 .. N - 1) {
    if :: place[q] < place[me] -> break :: else fi }
  if :: q == N -> order[place[me] - 1] = 0 :: else fi;
  q = 0
}
#define ALL_DONE (DONE(0) && DONE(1))
#define SOME_ENDED (sticky[OWN(0)] != 0 || sticky[OWN(1)] != 0)
#else
#define CAN_FINISH(channel) (begun[channel] && HEALTHY(channel))
inline take_turn() { skip }
#define ALL_DONE DONE(0)
#define SOME_ENDED (sticky[OWN(0)] != 0)
#endif

inline begin(channel) {
  c = channel;
  begun[c] = 1;
  n = passed[AT(me)] / 2 + 1;
  if :: passed[AT(me)] % 2 == 0 -> prepare_dispatch() :: else -> prepare_end() fi
}
inline finish(channel) {
  c = channel;
  take_turn();
  begun[c] = 0;
  n = passed[AT(me)] / 2 + 1;
  if
  :: !HEALTHY(c)
  :: HEALTHY(c) -> phase = (passed[AT(me)] % 2 == 0 -> DISPATCH : ending[c]); ending[c] = 0
  fi
}
#define IS_CLOSED (passed[AT(me)] % 2 == 0 && !begun[c])
inline misuse(channel) {
  c = channel;
  misused = 1; n = passed[AT(me)] / 2 + 1;
  if
  :: word = ABORT(n, (IS_CLOSED -> COMBINE : DISPATCH), me, CHANNEL_MISUSE)
  :: word = ABORT(n, (IS_CLOSED -> DISPATCH : COMBINE), me, PEER_LEFT)
  fi
}

/* A live rank that has not given up has passed every wait, and whoever gave up did so in the last one or later. */
inline end_rank() {
  num_ended++;
#if DEADLINE == 3
  assert(dead[me] || sticky[AT(me)] == 0 || dead[sticky[AT(me)] >> CULPRIT_SHIFT & 255]);
#endif
  if
  :: num_ended == N ->
     for (c : 0 .. C - 1) { for (p : 0 .. N - 1) { for (q : 0 .. N - 1) {
       assert(dead[p] || left[p] || sticky[AT(p)] || sticky[AT(q)] == 0 || passed[AT(q)] >= 2 * R - 1)
     } } } /* [abort_word.meaning] */
  :: else fi
}

inline forget() { d_step { c = 0; p = 0; q = 0; n = 0; phase = 0; todo = 0; word = 0; own = 0; looks = 0 } }

proctype rank(byte me) {
  byte c, p, q, n, phase, todo, ending[C];
  int word, own;
  bit begun[C], looks;
#if C > 1
  byte turns[C];
#endif
#if defined(M_SILENT_ADOPTION)
  bit was_told;
#endif
  do
    :: if
       :: atomic { CAN_BEGIN(0) -> begin(0) }
#if C > 1
       :: atomic { CAN_BEGIN(1) -> begin(1) }
#endif
       fi;
       if :: phase == DISPATCH -> send() :: else -> end_signal() fi;
       forget()
    :: if
       :: atomic { CAN_FINISH(0) -> finish(0) }
#if C > 1
       :: atomic { CAN_FINISH(1) -> finish(1) }
#endif
       fi;
       if :: phase != 0 -> wait_for_peers() :: else fi;
#if defined(DEADLINE)
       if
       :: looks -> if :: own != 0 -> tell(own) :: else fi; atomic { LOOKED_ON -> find_smallest() }
       :: else fi;
#endif
       if
       :: word != 0 -> fail()
#if defined(M_STICKY_IGNORED)
          ; passed[AT(me)]++
#endif
       :: word == 0 && phase == COMBINE -> atomic { pull(); close_round() }
       :: else fi;
       forget()
#if defined(MISUSE)
    :: if
       :: atomic { !misused && HEALTHY(0) -> misuse(0) }
#if C > 1
       :: atomic { !misused && HEALTHY(1) -> misuse(1) }
#endif
       fi;
       fail();
       forget()
#endif
    :: atomic { ALL_DONE -> break }
    :: atomic { SOME_ENDED -> left[me] = 1; break }
    OR_STOP
    od;
end:
  atomic { end_rank() }
}

init { atomic {
  byte r;
  for (r : 0 .. N - 1) { run rank(r) }
} }
