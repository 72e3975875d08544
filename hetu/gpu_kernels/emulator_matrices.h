// Matrices that a warp holds together, and copies that a thread waits for: what kernels say in PTX on a device.
//
// Follows `emulator.h`. Of a matrix operation each lane lends what it knows by address; the first that goes on works
// for all, as none of the others has moved. Ignored on purpose: shapes and types that no kernel uses.

namespace emulator {

struct Part {  // of a lane in an operation
    unsigned* out;                 // of a load: the registers
    const void* row;               // and eight values of 16 bits, of which this lane knows the place
    float* sum;                    // of a product: the result
    const unsigned *left, *right;  // and the operands
    bool done;
};

inline Part* part_of(unsigned lane) { return taken<Part*>(lane); }

// Four matrices of 8 x 8 values: lane 8 m + r knows row r of matrix m, and takes two neighbors of row lane / 4 of
// each.
inline void load(unsigned* out, const void* row, bool transposed, int line) {
    Part mine{out, row};
    if ((uintptr_t)row % 16) failure = "line " + std::to_string(line) + ": a row of a matrix does not lie at 16 bytes";
    meet(0xffffffffu, &mine, line);
    if (mine.done) return;
    for (unsigned lane = 0; lane < 32; lane++) {
        for (unsigned m = 0; m < 4; m++) {
            unsigned first = lane / 4, second = lane % 4 * 2, found = 0;
            for (unsigned i = 0; i < 2; i++) {
                unsigned r = transposed ? second + i : first, c = transposed ? first : second + i;
                found |= (unsigned)((const unsigned short*)part_of(m * 8 + r)->row)[c] << 16 * i;
            }
            part_of(lane)->out[m] = found;
        }
        part_of(lane)->done = true;
    }
}

// sum (16 x 8) += left (16 x K) right (K x 8). Lane 4 g + t holds of sum the columns 2 t and 2 t + 1 of the rows g and
// g + 8. A register holds P neighbors along K; of left the rows g and g + 8, then the same of the second half of K; of
// right both halves of column g. K is 16 for values of 16 bits, of which P = 2, and 8 for floats.
template <class S> float operand(unsigned bits, unsigned i, S) {
    S v;
    v.bits = (unsigned short)(bits >> 16 * i);
    return v;
}
inline float operand(unsigned bits, unsigned, float) { return same_bits<float>(bits & 0xffffe000u); }  // 11 bits

template <class S> void multiply(float* sum, const unsigned* left, const unsigned* right, S type, int line) {
    Part mine{nullptr, nullptr, sum, left, right};
    meet(0xffffffffu, &mine, line);
    if (mine.done) return;
    const unsigned P = 4 / sizeof(S), K = 8 * P;
    float a[16][K], b[K][8];
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < P; i++) {
            for (unsigned r = 0; r < 4; r++)
                a[g + r % 2 * 8][r / 2 * K / 2 + P * t + i] = operand(part_of(lane)->left[r], i, type);
            for (unsigned r = 0; r < 2; r++) b[r * K / 2 + P * t + i][g] = operand(part_of(lane)->right[r], i, type);
        }
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        for (unsigned i = 0; i < 4; i++) {
            float total = 0, *row = a[lane / 4 + i / 2 * 8];
            for (unsigned k = 0; k < K; k++) total += row[k] * b[k][lane % 4 * 2 + i % 2];
            part_of(lane)->sum[i] += total;
        }
        part_of(lane)->done = true;
    }
}

// Copies of all groups before this one arrive.
inline void arrive(unsigned group) {
    std::vector<Copy> later;
    for (Copy& c : self->copies)
        if (c.group < group) std::memset(c.to, 0, c.room), std::memcpy(c.to, c.from, c.size);
        else later.push_back(c);
    self->copies.swap(later);
}

inline void wait_for_copies() { arrive(self->groups + 1); }
inline void end_group() { self->groups++; }
template <unsigned GROUPS> void wait_for_groups() {
    if (self->groups > GROUPS) arrive(self->groups - GROUPS);
}

template <class V> void copy_async(V* to, const V* from, bool exists) {
    if (((uintptr_t)to | (uintptr_t)from) % sizeof(V)) failure = "an asynchronous copy whose places are not aligned";
    self->copies.push_back({to, from, exists ? sizeof(V) : 0, sizeof(V), self->groups});
    if (copies_at_once) wait_for_copies();
}

}  // namespace emulator

#define load_matrices(out, row) emulator::load(out, row, false, __LINE__)
#define load_matrices_transposed(out, row) emulator::load(out, row, true, __LINE__)
#define multiply_add(sum, left, right, type) emulator::multiply(sum, left, right, type, __LINE__)
template <class S> unsigned rounded_pair(float low, float high, S) {
    return S(low).bits | (unsigned)S(high).bits << 16;
}
using emulator::copy_async;
using emulator::end_group;
using emulator::wait_for_copies;
using emulator::wait_for_groups;
