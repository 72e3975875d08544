// Tiles in shared memory whose products tensor cores make, BM x DEPTH by DEPTH x BN, in 64 bytes of each row. In front
// of `warps.cu` or `warpgroups.cu`, which make them. Both give `multiply_along` for tiles whose rows run along the sum,
// `multiply_across` for tiles whose rows run across it, and what a warp has of the result: WM x WN.
//
// float32 stays float32: tensor cores take 11 bits of an operand, so each is split into two, and the three larger
// products are added outside, where rounding is to nearest: H. Ootomo, R. Yokota, "Recovering Single Precision Accuracy
// from Tensor Cores", 2022, section 4. Ignored on purpose: infinities in float32, of which that makes NaN.

const int EACH = sizeof(Chunk) / sizeof(S), DEPTH = 4 * EACH;  // values of a chunk, and of a row of a tile
typedef Chunk (*Along)[4];
typedef Chunk (*AcrossLeft)[BM / EACH];
typedef Chunk (*AcrossRight)[BN / EACH];

// What is added to the place of a chunk, bit by bit, so that those that are read together lie in different banks.
__device__ inline int along(int row) { return row / 2 % 4; }
__device__ inline int across(int row) { return sizeof(S) == 2 ? row % 8 : row % 4 * 2; }

// A value of 32 bits in a tile whose rows run across the sum.
template <class Tile> __device__ inline unsigned value_at(Tile tile, int row, int column) {
    return tile[row][column / 4 ^ across(row)].v[column % 4];
}

// A float as the nearest one of 11 bits and what that leaves, to 11 bits.
__device__ inline void split(unsigned& value, unsigned& rest) {
    const unsigned kept = 0xffffe000u, high = (value + 0x1000) & kept;
    rest = __float_as_uint(__uint_as_float(value) - __uint_as_float(high)) & kept;
    value = high;
}
