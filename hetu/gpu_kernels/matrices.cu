// Products of tensor cores and copies that a thread does not wait for, each one instruction of PTX (ISA 8.0, sections
// "Matrix multiply-accumulate", "Asynchronous warpgroup level matrix" and "cp.async"). In front of files whose kernels
// use them.

typedef Pack<unsigned, 4> Chunk;  // 16 bytes, 8 values of 16 bits or 4 of 32

#ifdef __CUDA_ARCH__  // the emulator brings its own
// Four matrices of 8 x 8 values: lane 8 m + r points at row r of matrix m, and gets two neighbors of each row lane / 4.
__device__ inline void load_matrices(unsigned (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
}
__device__ inline void load_matrices_transposed(unsigned (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
}
// sum (16 x 8) += left (16 x 16) right (16 x 8). Lane 4 g + t holds of sum the columns 2 t and 2 t + 1 of the rows g
// and g + 8; of left the same of both halves of its columns; of right the rows 2 t and 2 t + 1 of both halves of
// column g.
#define PRODUCTS_OF(type, name)                                                                                      \
    __device__ inline void multiply_add(float (&sum)[4], const unsigned (&left)[4], const unsigned* right, type) {   \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 "                                           \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                        \
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                 \
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));                 \
    }                                                                                                                \
    __device__ inline unsigned rounded_pair(float low, float high, type) {                                           \
        unsigned both;                                                                                               \
        asm("cvt.rn." name "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));                                 \
        return both;                                                                                                 \
    }
PRODUCTS_OF(half16, "f16") PRODUCTS_OF(bfloat16, "bf16")
// sum (16 x 8) += left (16 x 8) right (8 x 8) of floats with 11 bits of precision, of which the lane above holds the
// column t and, in the second half of its registers, t + 4 of left, and the rows t and t + 4 of right.
__device__ inline void multiply_add(float (&sum)[4], const unsigned (&left)[4], const unsigned* right, float) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // what Hopper alone has
// sum (64 x 64) += left (64 x 8) right (8 x 64) for four warps, which hold 16 rows each, as for products of 16 rows. Of
// `right` the columns lie in rows of 64 bytes whose chunks are permuted by `along`; this is where the first one begins.
// Operands are read until `end_products`, and sums not there before. Without `adds` the sum is the product alone.
#define SUMS(n) "+f"(sum[n][0]), "+f"(sum[n][1]), "+f"(sum[n][2]), "+f"(sum[n][3])
#define ALL_SUMS SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4), SUMS(5), SUMS(6), SUMS(7)
__device__ inline void multiply_group(float (&sum)[8][4], const unsigned (&left)[4], const Chunk* right, bool adds) {
    const unsigned long long permuted = 2, rows = 512 / 16;  // 64 bytes at a time; 8 rows follow 8 others
    const unsigned long long begin = (unsigned)__cvta_generic_to_shared(right) / 16, matrix = permuted << 62 | rows << 32;
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %37, 0;"
                 "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11,"
                 "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
                 "{%32, %33, %34, %35}, %36, adds, 1, 1;}"
                 : ALL_SUMS
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(matrix | begin), "r"((int)adds));
}
// Before the first product: registers are written; and of shared memory what this thread has written is shown to them.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void end_products(float (&sum)[8][4]) {
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" : ALL_SUMS :: "memory");
}
#endif
// Starts a copy to shared memory, of zeros where nothing exists.
template <class V> __device__ inline void copy_async(V* to, const V* from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(__cvta_generic_to_global(from)), "n"(sizeof(V)),
                    "r"(exists ? (int)sizeof(V) : 0) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Copies of a thread form groups, which end here; and wait for all but the last `GROUPS` of them.
__device__ inline void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS> __device__ inline void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS) : "memory");
}
#endif
