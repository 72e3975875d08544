// Matrices that a warp holds together, and copies that a thread waits for: what kernels say in PTX on a device.
//
// Follows `emulator.h`. Ignored on purpose: shapes and types that no kernel uses.

namespace emulator {

void load(unsigned* out, const void* row, bool transposed, int line);
void multiply(float* sum, const unsigned* left, const unsigned* right, unsigned values, float (*value)(unsigned, unsigned),
              int line);
void multiply_later(float (*sum)[4], const unsigned* left, const void* right, bool adds, int line);
void begin_products();
void show_to_products();
void multiply_now();
void copy(void* to, const void* from, size_t size, bool exists);
void end_group();
void wait_for_groups(unsigned left);
void wait_for_copies();

// Value i of a register.
template <class S> UNSEEN float value_of(unsigned bits, unsigned i) {
    if constexpr (std::is_same_v<S, float>) return same_bits<float>(bits & 0xffffe000u);  // 11 bits
    else {
        S v;
        v.bits = (unsigned short)(bits >> 16 * i);
        return v;
    }
}

template <class S> UNSEEN void multiply(float* sum, const unsigned* left, const unsigned* right, S, int line) {
    multiply(sum, left, right, 4 / sizeof(S), value_of<S>, line);
}

}  // namespace emulator

#define load_matrices(out, row) emulator::load(out, row, false, __LINE__)
#define load_matrices_transposed(out, row) emulator::load(out, row, true, __LINE__)
#define multiply_add(sum, left, right, type) emulator::multiply(sum, left, right, type, __LINE__)
#define multiply_group(sum, left, right, adds) emulator::multiply_later(sum, left, right, adds, __LINE__)
using emulator::begin_products;
using emulator::show_to_products;
UNSEEN inline void end_products(float (&)[8][4]) { emulator::multiply_now(); }
template <class S> UNSEEN unsigned rounded_pair(float low, float high, S) {
    return S(low).bits | (unsigned)S(high).bits << 16;
}
template <class V> UNSEEN void copy_async(V* to, const V* from, bool exists) {
    emulator::copy(to, from, sizeof(V), exists);
}
using emulator::end_group;
using emulator::wait_for_copies;
template <unsigned GROUPS> UNSEEN void wait_for_groups() { emulator::wait_for_groups(GROUPS); }
