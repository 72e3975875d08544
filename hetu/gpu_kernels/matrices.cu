// Products of tensor cores and copies that a thread does not wait for, each one instruction of PTX (ISA 7.0, sections
// "Matrix multiply-accumulate" and "cp.async"). In front of files whose kernels use them.

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
