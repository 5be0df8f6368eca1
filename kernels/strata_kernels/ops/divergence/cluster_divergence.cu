// The kernel of the generalized Jensen-Shannon divergence of long rows of bf16 logits, for Hopper GPUs.
//
// Like `narrow_divergence_kernel`, it reads each logit once and keeps a part of a row in registers through all phases.
// Here the parts of a row belong to the thread blocks of a cluster, which send their sums straight into each other's
// shared memory: 0.07 us, where words of global memory take 0.7 to 1.1 us, because they queue behind the rows that the
// same multiprocessor loads and stores. A cluster loops over rows. In a thread block
//
//     WARPS warps compute; each thread has LOGITS logits of the student and of the teacher,
//     one thread loads rows into shared memory, up to STAGES of them,
//     three warps add up sums of the student, sums of the teacher and terms of the loss, and exchange them.
//
// So no computing warp waits for another one in the middle of a phase, and each result of an exchange is needed only
// after another phase. Phases of row i, in this order:
//
//     1. exponentials of the student of row i, and maximum of the teacher of row i + 1
//     2. exponentials of the teacher of row i + 1, and maximum of the student of row i + 1
//     3. gradient of row i - 1
//     4. p and c of row i, and its terms of the loss
//
// Maxima are those of a thread, so no phase waits for a maximum of the row. Phase 1 keeps its exponentials for phase 4,
// which saves one of five special-function instructions per pair of logits; with these, the kernel is bound by them.
//
// Formulas and names as in `narrow_kernel.py`: with x = z / T log2 e, and y of the teacher, log2 q - log2 p = d + e,
// c = log2(beta 2^d + (1 - beta) 2^-e), less than there by e, and p here is 2^(x - maximum of the thread). e is the
// rounding error of the difference of the row's log-sum-exps, which would be one of every d, and all of the same sign.
//
// The host defines CLUSTER, thread blocks of a row, and SHARED, bytes of shared memory of a block.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARPS = 8, THREADS = WARPS * 32, HELPERS = 4 * 32, STAGES = 3;
constexpr int CHUNKS = 8;              // 16-byte pieces of a part per thread
constexpr int LOGITS = 8 * CHUNKS;     // logits of each tensor per thread
constexpr int PART = THREADS * LOGITS; // most logits of a block
// Registers per thread, which groups of 128 threads exchange: 384 threads with 168 become 256 with 232 and 128 with 40.
constexpr int COMPUTING_REGISTERS = 232, HELPER_REGISTERS = 40;

constexpr float LN2 = 0.6931471805599453f;
constexpr float LEAST_LOG = -100.0f; // lower bound of log2-probabilities: 1e-30
constexpr float LEAST = -1e30f;      // lower bound of maxima, so that differences from them are not NaN
constexpr u32 NOTHING = 0xff80ff80u; // two logits of -inf

struct __align__(8) Pair { float x, y; };
struct __align__(16) Quad { float x, y, z, w; };
struct __align__(16) Words { u32 x, y, z, w; };

// Results of the exchanges for a row, by all blocks of the cluster.
struct __align__(16) Row { float maximum, log_sum, sum; u32 least; };

// Exchange of a value per thread: `mine` of this block's threads, `all` of the cluster's blocks.
template <int SLOTS> struct Exchange {
    Pair mine[SLOTS][THREADS];
    Pair all[SLOTS][CLUSTER];
    u64 ready[SLOTS], arrived[SLOTS], done[SLOTS]; // mbarriers: `mine` written, `all` written, the row's result written
};

struct __align__(128) Shared {
    unsigned char student[STAGES][2 * PART], teacher[STAGES][2 * PART];
    int row[STAGES];                // -1: no more rows
    u64 full[STAGES], empty[STAGES];
    Exchange<2> of_student, of_terms;
    // One row ahead of the others. Two slots are enough for those, because a block sends the sums of a row only after
    // it has received those of the row before from all blocks, and so has each of them read what it had received.
    Exchange<4> of_teacher;
    Row student_row[2], teacher_row[4];
    Pair gradient_row[2];           // factor of p c, and of p
};
static_assert(sizeof(Shared) <= SHARED, "SHARED is too small");

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// The address in the shared memory of another block.
__device__ __forceinline__ u32 address_in(u32 rank, const void* p) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(p)), "r"(rank));
    return there;
}

__device__ __forceinline__ void initialize(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals));
}

__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}

// Wait for the n-th completion of a barrier (from 0), of which this thread has seen all before.
__device__ __forceinline__ void wait(u64* barrier, u32 n) {
    asm volatile("{ .reg .pred done;"
                 "WAIT: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;"
                 "@done bra DONE; bra WAIT; DONE: }" ::"r"(address(barrier)), "r"(n & 1) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    __syncwarp(); // the warp's threads must arrive together
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void load(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address(to)), "l"(from), "r"(bytes), "r"(address(barrier)) : "memory");
}

__device__ __forceinline__ float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Maximum, NaN if one is NaN.
__device__ __forceinline__ float larger(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

__device__ __forceinline__ u32 larger_words(u32 a, u32 b) {
    u32 y;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

__device__ __forceinline__ u32 larger_words(u32 a, Words b) {
    return larger_words(larger_words(a, b.x), larger_words(larger_words(b.y, b.z), b.w));
}

__device__ __forceinline__ u32 word(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(y) : "f"(low), "f"(high));
    return y;
}

__device__ __forceinline__ float low(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high(u32 word) { return __uint_as_float(word & 0xffff0000u); }
__device__ __forceinline__ float maximum_of(u32 word) { return larger(larger(low(word), high(word)), LEAST); }

// Maximum over the warp, by integers of the same order. A NaN may get lost; sums of exponentials keep it.
__device__ __forceinline__ float warp_maximum(float x) {
    int key = __float_as_int(x);
    key ^= (key >> 31) & 0x7fffffff;
    key = __reduce_max_sync(~0u, key);
    return __int_as_float(key ^ ((key >> 31) & 0x7fffffff));
}

// Sum over groups of SIZE lanes.
template <int SIZE> __device__ __forceinline__ float group_sum(float x) {
#pragma unroll
    for (int offset = SIZE / 2; offset; offset >>= 1) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}

// A thread's value for exchange i, by all threads of a warp.
template <int SLOTS> __device__ __forceinline__ void give(Exchange<SLOTS>& exchange, int i, Pair value) {
    exchange.mine[i % SLOTS][threadIdx.x] = value;
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&exchange.ready[i % SLOTS]);
}

// Send a value of this block to all blocks, and wait for theirs; returns that of the lane's block.
template <int SLOTS> __device__ __forceinline__ Pair swap(Exchange<SLOTS>& exchange, int i, Pair value, u32 rank) {
    const int slot = i % SLOTS, lane = threadIdx.x % 32;
    if (lane < CLUSTER)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                         address_in(lane, &exchange.all[slot][rank])), "f"(value.x), "f"(value.y),
                     "r"(address_in(lane, &exchange.arrived[slot])) : "memory");
    wait(&exchange.arrived[slot], i / SLOTS);
    return exchange.all[slot][lane % CLUSTER];
}

// Wait for the values of this block's threads; returns the address of the lane's first.
template <int SLOTS> __device__ __forceinline__ const Pair* collect(Exchange<SLOTS>& exchange, int i) {
    const int slot = i % SLOTS, lane = threadIdx.x % 32;
    if (lane == 0) arrive_and_expect(&exchange.arrived[slot], sizeof(Pair) * CLUSTER);
    wait(&exchange.ready[slot], i / SLOTS);
    return &exchange.mine[slot][lane];
}

// (maximum, sum relative to it) of a row, from those of all threads.
template <int SLOTS> __device__ __forceinline__ Pair row_sum(Exchange<SLOTS>& exchange, int i, u32 rank) {
    const Pair* mine = collect(exchange, i);
    Pair values[WARPS];
    float maximum = LEAST, sum = 0;
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
        values[k] = mine[k * 32];
        maximum = larger(maximum, values[k].x);
    }
    maximum = warp_maximum(maximum);
#pragma unroll
    for (int k = 0; k < WARPS; k++) sum += values[k].y * exp2_(values[k].x - maximum);
    const Pair one = swap(exchange, i, Pair{maximum, group_sum<32>(sum)}, rank);
    maximum = warp_maximum(one.x);
    return Pair{maximum, group_sum<CLUSTER>(one.y * exp2_(one.x - maximum))};
}

// Two words of log2-probabilities' lower bound, as logits.
__device__ __forceinline__ u32 least_words(float maximum, float factor) {
    const float least = (maximum + LEAST_LOG) / factor;
    return word(least, least);
}

__device__ __forceinline__ Row row_of(Pair sum, float factor) {
    return {sum.x, log2_(sum.y), sum.y, least_words(sum.x, factor)};
}

// a + b as (rounded sum, its error).
__device__ __forceinline__ Pair exact_sum(float a, float b) {
    const float sum = a + b, part = sum - a;
    return {sum, (a - (sum - part)) + (b - part)};
}

// The difference of the log-sum-exps of two rows, as (rounded, its error).
__device__ __forceinline__ Pair difference(Row a, Row b) {
    const Pair maxima = exact_sum(a.maximum, -b.maximum), all = exact_sum(maxima.x, a.log_sum - b.log_sum);
    return {all.x, maxima.y + all.y};
}

// Phases 1 and 2: the sum of exponentials of a part, relative to `maximum`, kept in `kept` if it is the student's;
// and the maximum of each half of the words of another part.
template <bool KEEP>
__device__ __forceinline__ float exponentials(
    const Words* part, float maximum, float factor, float (&kept)[LOGITS], const Words* other, u32& other_maximum
) {
    float sum[4] = {0, 0, 0, 0};
    other_maximum = NOTHING;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        const Words words = part[k * THREADS];
        const u32 pairs[4] = {words.x, words.y, words.z, words.w};
        other_maximum = larger_words(other_maximum, other[k * THREADS]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float a = exp2_(low(pairs[j]) * factor - maximum), b = exp2_(high(pairs[j]) * factor - maximum);
            if (KEEP) kept[8 * k + 2 * j] = a, kept[8 * k + 2 * j + 1] = b;
            sum[j] += a;
            sum[j] += b;
        }
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// parameters: z [N, V] of the student, t of the teacher, dz, which may be z, strides in bytes; target [N]; scale [N],
// of the gradients; loss [N]. factor: log2 e / temperature.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS + HELPERS, 1) cluster_divergence(
    const unsigned char* z, const unsigned char* t, unsigned char* dz, const i64* target, const float* scale,
    float* loss, int n_rows, int vocabulary, i64 stride_z, i64 stride_t, i64 stride_dz, i64 stride_scale,
    i64 ignore_index, float beta, float factor
) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& s = *(Shared*)memory;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    // This block's part of a row, of whole 16-byte pieces.
    const int part = (vocabulary + 8 * CLUSTER - 1) / (8 * CLUSTER) * 8;
    const int start = part * rank, count = max(min(part, vocabulary - start), 0);

    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) initialize(&s.full[i], 1), initialize(&s.empty[i], WARPS + 3);
        for (int i = 0; i < 2; i++) {
            initialize(&s.of_student.ready[i], WARPS), initialize(&s.of_student.arrived[i], 1);
            initialize(&s.of_terms.ready[i], WARPS), initialize(&s.of_terms.arrived[i], 1);
            initialize(&s.of_student.done[i], 1), initialize(&s.of_terms.done[i], 1);
        }
        for (int i = 0; i < 4; i++) {
            initialize(&s.of_teacher.ready[i], WARPS), initialize(&s.of_teacher.arrived[i], 1);
            initialize(&s.of_teacher.done[i], 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Loads never write these.
    for (int i = count / 2 + thread; i < PART / 2; i += blockDim.x)
        for (int j = 0; j < STAGES; j++) ((u32*)s.student[j])[i] = ((u32*)s.teacher[j])[i] = NOTHING;
    cluster_sync();

    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(HELPER_REGISTERS));
        if (warp == WARPS) {
            for (int row = first, i = 0; lane == 0; row += step) {
                if (row < n_rows && target[row] == ignore_index) continue;
                const int stage = i % STAGES;
                if (i >= STAGES) wait(&s.empty[stage], i / STAGES - 1);
                i++;
                s.row[stage] = row < n_rows ? row : -1;
                arrive_and_expect(&s.full[stage], row < n_rows ? 4 * count : 0);
                if (row >= n_rows) break;
                if (count) {
                    load(s.teacher[stage], t + row * stride_t + 2 * start, 2 * count, &s.full[stage]);
                    load(s.student[stage], z + row * stride_z + 2 * start, 2 * count, &s.full[stage]);
                }
            }
        } else {
            for (int i = 0;; i++) {
                wait(&s.full[i % STAGES], i / STAGES);
                const int row = s.row[i % STAGES];
                if (row < 0) break;
                __syncwarp();
                if (lane == 0) arrive(&s.empty[i % STAGES]);
                if (warp == WARPS + 1) {
                    const Pair sum = row_sum(s.of_student, i, rank);
                    if (lane == 0) {
                        s.student_row[i % 2] = row_of(sum, factor);
                        arrive(&s.of_student.done[i % 2]);
                    }
                } else if (warp == WARPS + 2) {
                    const Pair sum = row_sum(s.of_teacher, i, rank);
                    if (lane == 0) {
                        s.teacher_row[i % 4] = row_of(sum, factor);
                        arrive(&s.of_teacher.done[i % 4]);
                    }
                } else {
                    // factor LN2 is 1 / temperature.
                    const float row_scale = scale[row * stride_scale] * (beta - 1.0f) * LN2 * factor * LN2;
                    const Pair* mine = collect(s.of_terms, i);
                    float of_p = 0, of_q = 0;
#pragma unroll
                    for (int k = 0; k < WARPS; k++) of_p += mine[k * 32].x, of_q += mine[k * 32].y;
                    const Pair one = swap(s.of_terms, i, Pair{group_sum<32>(of_p), group_sum<32>(of_q)}, rank);
                    of_p = group_sum<CLUSTER>(one.x), of_q = group_sum<CLUSTER>(one.y);
                    if (lane == 0) {
                        const float sum = s.student_row[i % 2].sum, mean = of_p / sum, of_c = row_scale / sum;
                        s.gradient_row[i % 2] = {of_c, mean * of_c};
                        const float error = difference(s.student_row[i % 2], s.teacher_row[i % 4]).y;
                        arrive(&s.of_terms.done[i % 2]);
                        const float of_teacher = beta * (of_q / sum) * exp2_(error);
                        if (rank == 0) loss[row] = -LN2 * ((1.0f - beta) * (mean + error) + of_teacher);
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTING_REGISTERS));
        float e[LOGITS], p[LOGITS], c[LOGITS];
        float student_maximum = LEAST, teacher_maximum = LEAST, row_factor = 0;
        int row = -1, before = -1;           // rows i and i - 1
        // With i = -1, phase 1 only computes the maximum. __syncwarp keeps phases apart in the machine code, which
        // would otherwise mix them and run out of registers.
        for (int i = -1; i < 0 || row >= 0 || before >= 0; i++) {
            int after = -1;
            const int stage = (i + STAGES) % STAGES, next = (i + 1) % STAGES;
            const Words* student = (const Words*)s.student[stage] + thread;
            const Words* teacher = (const Words*)s.teacher[stage] + thread;
            const Words* next_student = (const Words*)s.student[next] + thread;
            const Words* next_teacher = (const Words*)s.teacher[next] + thread;
            if (i < 0 || row >= 0) {
                wait(&s.full[next], (i + 1) / STAGES);
                after = s.row[next];
            }
            __syncwarp();

            // 1.
            const float maximum = student_maximum;
            u32 words = NOTHING;
            if (row >= 0) {
                const float sum = exponentials<true>(student, maximum, factor, e, next_teacher, words);
                give(s.of_student, i, Pair{maximum, sum});
            } else if (after >= 0) {
#pragma unroll
                for (int k = 0; k < CHUNKS; k++) words = larger_words(words, next_teacher[k * THREADS]);
            }
            teacher_maximum = maximum_of(words) * factor;
            __syncwarp();

            // 2.
            if (after >= 0) {
                const float sum = exponentials<false>(next_teacher, teacher_maximum, factor, e, next_student, words);
                give(s.of_teacher, i + 1, Pair{teacher_maximum, sum});
                student_maximum = maximum_of(words) * factor;
            }
            __syncwarp();

            // 3.
            if (before >= 0) {
                wait(&s.of_terms.done[(i - 1) % 2], (i - 1) / 2);
                __syncwarp();
                Pair of = s.gradient_row[(i - 1) % 2];
                of.x *= row_factor, of.y *= row_factor;
                unsigned char* to_row = dz + before * stride_dz + 2 * start + 16 * threadIdx.x;
                const int left = count - 8 * threadIdx.x; // logits of the part from this thread's first on
#pragma unroll
                for (int k = 0; k < CHUNKS; k++) {
                    u32 out[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int n = 8 * k + 2 * j;
                        out[j] = word(p[n] * (c[n] * of.x - of.y), p[n + 1] * (c[n + 1] * of.x - of.y));
                    }
                    if (8 * k * THREADS < left)
                        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to_row + 16 * k * THREADS),
                                     "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3]) : "memory");
                }
            }
            __syncwarp();

            // 4.
            if (row >= 0) {
                wait(&s.of_teacher.done[i % 4], i / 4);
                wait(&s.of_student.done[i % 2], i / 2);
                __syncwarp();
                const Row of_student = s.student_row[i % 2], of_teacher = s.teacher_row[i % 4];
                const Pair offset = difference(of_student, of_teacher);
                const float share = (1.0f - beta) * exp2_(-offset.y);
                // p is bounded as the logit in x_word is. If all of this thread are below, p is relative to the bound.
                // Many tokens may have it, so it is as exact as their d, whose first term is `bound`.
                const float least = low(of_student.least), top = fmaxf(maximum, least * factor);
                const float bound = __fmaf_rn(-least, factor, offset.x);
                const Pair above = exact_sum(offset.x, -top), exponent = exact_sum(above.x, -bound);
                const float least_p = exp2_(exponent.x) * exp2_(above.y + exponent.y);
                float of_p[4] = {0, 0, 0, 0}, of_q[4] = {0, 0, 0, 0};
#pragma unroll
                for (int k = 0; k < CHUNKS; k++) {
                    const Words x = student[k * THREADS], y = teacher[k * THREADS];
                    const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const u32 x_word = larger_words(xs[j / 2], of_student.least);
                        const u32 y_word = larger_words(ys[j / 2], of_teacher.least);
                        const float x_logit = j % 2 ? high(x_word) : low(x_word);
                        const float y_logit = j % 2 ? high(y_word) : low(y_word);
                        const float d = __fmaf_rn(y_logit, factor, __fmaf_rn(-x_logit, factor, offset.x));
                        const float ratio = exp2_(d);
                        const float c_ = log2_(beta * ratio + share);
                        const float p_ = fmaxf(e[8 * k + j], least_p);
                        of_p[j / 2] += p_ * c_;
                        of_q[j / 2] += (p_ * ratio) * (c_ - d);
                        p[8 * k + j] = p_, c[8 * k + j] = c_;
                    }
                }
                const Pair below = exact_sum(top, -of_student.maximum);
                row_factor = exp2_(below.x) * exp2_(below.y);
                give(s.of_terms, i, Pair{((of_p[0] + of_p[1]) + (of_p[2] + of_p[3])) * row_factor,
                                         ((of_q[0] + of_q[1]) + (of_q[2] + of_q[3])) * row_factor});
                if (lane == 0) arrive(&s.empty[stage]);
            }
            __syncwarp();
            before = row, row = after;
        }
        // Each warp its own rows, so that it waits for targets while others store.
        for (int ignored = first + warp * step; ignored < n_rows; ignored += WARPS * step) {
            if (target[ignored] != ignore_index) continue;
            if (rank == 0 && lane == 0) loss[ignored] = 0;
            Words* out = (Words*)(dz + ignored * stride_dz + 2 * start);
            for (int k = lane; k < count / 8; k += 32) out[k] = Words{0, 0, 0, 0};
        }
    }
    cluster_sync();
}
