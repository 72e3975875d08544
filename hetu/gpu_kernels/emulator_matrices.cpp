// What `emulator_matrices.h` declares, and half precision: follows `emulator.cpp`.
//
// Of a matrix operation each lane lends what it knows by address; the first that goes on works for all, as none of the
// others has moved.

namespace emulator {

struct Part {  // of a lane in an operation
    unsigned* out;                 // of a load: the registers
    const void* row;               // and eight values of 16 bits, of which this lane knows the place
    float* sum;                    // of a product: the result
    const unsigned *left, *right;  // and the operands
    bool done;
};

static Part& part_of(unsigned lane) { return *(Part*)taken(lane); }

// Four matrices of 8 x 8 values: lane 8 m + r knows row r of matrix m, and takes two neighbors of row lane / 4 of
// each.
void load(unsigned* out, const void* row, bool transposed, int line) {
    Part mine{out, row};
    if ((uintptr_t)row % 16) fail("a row of a matrix does not lie at 16 bytes", line);
    access(row, 16, false);
    meet(0xffffffffu, (uint64_t)&mine, line);
    if (mine.done) return;
    for (unsigned lane = 0; lane < 32; lane++) {
        for (unsigned m = 0; m < 4; m++) {
            unsigned first = lane / 4, second = lane % 4 * 2, found = 0;
            for (unsigned i = 0; i < 2; i++) {
                unsigned r = transposed ? second + i : first, c = transposed ? first : second + i;
                found |= (unsigned)((const unsigned short*)part_of(m * 8 + r).row)[c] << 16 * i;
            }
            part_of(lane).out[m] = found;
        }
        part_of(lane).done = true;
    }
}

// sum (16 x 8) += left (16 x K) right (K x 8). Lane 4 g + t holds of sum the columns 2 t and 2 t + 1 of the rows g and
// g + 8. A register holds P neighbors along K; of left the rows g and g + 8, then the same of the second half of K; of
// right both halves of column g. K is 16 for values of 16 bits, of which P = 2, and 8 for floats.
void multiply(float* sum, const unsigned* left, const unsigned* right, unsigned P, float (*value)(unsigned, unsigned),
              int line) {
    Part mine{nullptr, nullptr, sum, left, right};
    meet(0xffffffffu, (uint64_t)&mine, line);
    if (mine.done) return;
    const unsigned K = 8 * P;
    float a[16][16], b[16][8];
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < P; i++) {
            for (unsigned r = 0; r < 4; r++) a[g + r % 2 * 8][r / 2 * K / 2 + P * t + i] = value(part_of(lane).left[r], i);
            for (unsigned r = 0; r < 2; r++) b[r * K / 2 + P * t + i][g] = value(part_of(lane).right[r], i);
        }
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        for (unsigned i = 0; i < 4; i++) {
            float total = 0, *row = a[lane / 4 + i / 2 * 8];
            for (unsigned k = 0; k < K; k++) total += row[k] * b[k][lane % 4 * 2 + i % 2];
            part_of(lane).sum[i] += total;
        }
        part_of(lane).done = true;
    }
}

// sum (64 x 64) += left (64 x 8) right (8 x 64) for four warps: 16 x 64 for each. As late as it may be, when its operands
// have to lie as they did.
void multiply_later(float (*sum)[4], const unsigned* left, const void* right, bool adds, int line) {
    if (!self->begun) fail("a product of a warpgroup before `begin_products`", line);
    self->products.push_back({sum, {left[0], left[1], left[2], left[3]}, (uintptr_t)right, adds, line});
}

void begin_products() { self->begun = true; }
void show_to_products() { self->shows++; }

// An operand in shared memory, which the thread that wrote it must have shown.
static unsigned shown(uintptr_t place, int line) {
    access((const void*)place, 4, false);
    const Cell& cell = cells[(place - (uintptr_t)arena) / 4];
    if (cell.write.thread == MANY || fibers[cell.write.thread].shows == cell.shows)
        fail("a product of a warpgroup reads what was not shown to it by `show_to_products`", line);
    return *(const unsigned*)place;
}

void multiply_now() {
    for (const Product& p : self->products)
        for (unsigned n = 0; n < 8; n++) {
            unsigned right[2];
            for (unsigned half = 0; half < 2; half++) {  // a chunk of 16 bytes changes places by the bits of its row
                const uintptr_t chunk = p.right + (n * 8 + lane() / 4) * 64 + half * 16;
                right[half] = shown((chunk ^ (chunk >> 7 & 3) << 4) + lane() % 4 * 4, p.line);
            }
            if (!p.adds) std::fill(p.sum[n], p.sum[n] + 4, 0.f);
            multiply(p.sum[n], p.left, right, 1, value_of<float>, p.line);
        }
    self->products.clear(), self->begun = false;
}

// Copies of all groups before this one arrive.
static void arrive(unsigned group) {
    std::vector<Copy> later;
    for (const Copy& c : self->copies) {
        if (c.group >= group) {
            later.push_back(c);
            continue;
        }
        access(c.to, c.size, true);
        c.exists ? std::memcpy(c.to, c.from, c.size) : std::memset(c.to, 0, c.size);
    }
    self->copies.swap(later);
}

void wait_for_copies() { arrive(self->groups + 1); }
void end_group() { self->groups++; }
void wait_for_groups(unsigned left) {
    if (self->groups > left) arrive(self->groups - left);
}

void copy(void* to, const void* from, size_t size, bool exists) {
    if (((uintptr_t)to | (uintptr_t)from) % size) fail("an asynchronous copy whose places are not aligned");
    access(to, size, true);
    if (exists) access(from, size, false);
    self->copies.push_back({to, from, size, exists, self->groups});
    if (copies_at_once) wait_for_copies();
}

}  // namespace emulator

// IEEE half precision without hardware: nearest even, with subnormal numbers, infinities and NaN.
float half_to_float(unsigned short h) {
    unsigned sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    float v = std::ldexp((float)fraction, -24);
    return sign ? -v : v;
}
unsigned short float_to_half(float v) {
    unsigned sign = __float_as_uint(v) >> 16 & 0x8000u;
    if (v != v) return sign | 0x7fff;
    if (v == 0) return sign;
    float size = std::fabs(v);
    if (size >= 65520.f) return sign | 0x7c00;
    int exponent;
    std::frexp(size, &exponent);
    int shift = std::max(exponent - 11, -24);  // the weight of the last bit
    unsigned whole = (unsigned)std::nearbyint(std::ldexp(size, -shift));  // 11 bits; 2048 carries into the exponent
    return sign | (whole + ((unsigned)(shift + 24) << 10));
}
