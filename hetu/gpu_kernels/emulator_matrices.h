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

// sum (16 x 8) += left (16 x 16) right (16 x 8). Lane 4 g + t holds of sum the columns 2 t and 2 t + 1 of the rows g
// and g + 8; of left the same of both halves of its columns; of right the rows 2 t and 2 t + 1 of both halves of
// column g.
template <class S> void multiply(float* sum, const unsigned* left, const unsigned* right, S, int line) {
    Part mine{nullptr, nullptr, sum, left, right};
    meet(0xffffffffu, &mine, line);
    if (mine.done) return;
    float a[16][16], b[16][8];
    auto value = [](const unsigned* registers, unsigned i) {
        S v;
        v.bits = (unsigned short)(registers[i / 2] >> 16 * (i % 2));
        return (float)v;
    };
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < 8; i++) a[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = value(part_of(lane)->left, i);
        for (unsigned i = 0; i < 4; i++) b[2 * t + i % 2 + i / 2 * 8][g] = value(part_of(lane)->right, i);
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        for (unsigned i = 0; i < 4; i++) {
            float total = 0, *row = a[lane / 4 + i / 2 * 8];
            for (unsigned k = 0; k < 16; k++) total += row[k] * b[k][lane % 4 * 2 + i % 2];
            part_of(lane)->sum[i] += total;
        }
        part_of(lane)->done = true;
    }
}

inline void wait_for_copies() {
    for (Copy& c : self->copies) std::memset(c.to, 0, c.room), std::memcpy(c.to, c.from, c.size);
    self->copies.clear();
}

template <class V> void copy_async(V* to, const V* from, bool exists) {
    if (((uintptr_t)to | (uintptr_t)from) % sizeof(V)) failure = "an asynchronous copy whose places are not aligned";
    self->copies.push_back({to, from, exists ? sizeof(V) : 0, sizeof(V)});
    if (copies_at_once) wait_for_copies();
}

}  // namespace emulator

#define load_matrices(out, row) emulator::load(out, row, false, __LINE__)
#define load_matrices_transposed(out, row) emulator::load(out, row, true, __LINE__)
#define multiply_add(sum, left, right, type) emulator::multiply(sum, left, right, type, __LINE__)
template <class S> unsigned rounded_pair(float low, float high, S) {
    return S(low).bits | (unsigned)S(high).bits << 16;
}
inline float power_of_two(float v) { return exp2f(v); }
using emulator::copy_async;
using emulator::wait_for_copies;
