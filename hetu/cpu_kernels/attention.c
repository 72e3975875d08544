// Attention and its gradient: y = softmax(scale q k^T) v for each head, with causal order, masks and biases.
//
// A head is worked through in strips of queries. The scores of a strip lie with the queries side by side, as scores^T =
// k q^T: then every step of the softmax is the same for all numbers of a vector, and no product needs k^T. The gradient
// makes the scores again from what is kept of each query, `total`, the logarithm of the sum of its powers. Keys that no
// query of a strip sees are left out, so that causal order, lengths and windows save their work.

#include <string.h>

#pragma STDC FP_CONTRACT ON

// What a head means. `seen` may be 0, as may `bias`; a query that sees nothing weighs all keys evenly.
static T score(const T* q, const T* k, long long d, T scale) {
    T sum = 0;
    for (long long f = 0; f < d; f++) sum += q[f] * k[f];
    return scale * sum;
}

void attention_plainly(const Word* a, long long first, long long last, char* scratch) {
    const T *q = a[0].p, *k = a[1].p, *v = a[2].p;
    const unsigned char* seen = a[3].p;
    const T* bias = a[4].p;
    T *y = a[5].p, *total = a[6].p, *scores = a[7].p;
    const long long s = a[8].n, t = a[9].n, d = a[10].n, e = a[11].n;
    const T scale = a[12].x;
    const bool causal = a[13].n;
    for (long long i = 0; i < s; i++) {
        bool any = false;
        T most = -INFINITY, sum = 0;
        for (long long j = 0; j < t; j++) any |= (!seen || seen[i * t + j]) && (!causal || j <= i);
        for (long long j = 0; j < t; j++) {
            const bool sees = (!seen || seen[i * t + j]) && (!causal || j <= i);
            scores[j] = sees ? score(q + i * d, k + j * d, d, scale) + (bias ? bias[i * t + j] : 0) : any ? -INFINITY : 0;
            most = fmax(most, scores[j]);
        }
        for (long long j = 0; j < t; j++) sum += exp(scores[j] - most);
        total[i] = most + log(sum);
        for (long long c = 0; c < e; c++) {
            y[i * e + c] = 0;
            for (long long j = 0; j < t; j++) y[i * e + c] += exp(scores[j] - total[i]) * v[j * e + c];
        }
    }
}

// -- products ----------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
enum { BYTES = 64, ROWS = 8 };  // 16 sums of the 32 registers
#define EACH_ROW(do) do(0) do(1) do(2) do(3) do(4) do(5) do(6) do(7)
#else
enum { BYTES = 32, ROWS = 4 };
#define EACH_ROW(do) do(0) do(1) do(2) do(3)
#endif
enum { LANES = BYTES / sizeof(T), UNIT = 16, STRIP = 64, DEEP = 256 };  // UNIT: what sizes in scratch are multiples of
typedef T V __attribute__((vector_size(BYTES), may_alias));
typedef T Loose __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));  // anywhere in memory

typedef struct {  // a matrix whose rows and columns may lie anywhere
    const T* at;
    long long row, column;
} Left;

typedef struct {  // a matrix in whole vectors, mostly in scratch
    T* at;
    long long pitch;
} Block;

// ROWS rows of 2 vectors: c = (add ? c : 0) + x y over `count` columns of x. All sums are named, as arrays of them
// leave the registers; the empty asm keeps one moving pointer to x, not one for each row.
#define OFFSET(r) const long long row##r = r * x.row;
#define BEGIN(r) V s##r = add ? *(V*)(c.at + r * c.pitch) : none, t##r = add ? *(V*)(c.at + r * c.pitch + LANES) : none;
#define STEP(r) { const T f = from[row##r]; s##r += f * u; t##r += f * w; }
#define END(r) *(V*)(c.at + r * c.pitch) = s##r, *(V*)(c.at + r * c.pitch + LANES) = t##r;
static __attribute__((noinline)) void wide_tile(Left x, const T* y, long long pitch, Block c, long long count, bool add) {
    const V none = {0};
    const T* from = x.at;
    EACH_ROW(OFFSET)
    EACH_ROW(BEGIN)
    for (; count; count--, from += x.column, y += pitch) {
        __asm__("" : "+r"(from));
        const V u = *(const Loose*)y, w = *(const Loose*)(y + LANES);
        EACH_ROW(STEP)
    }
    EACH_ROW(END)
}

// The same with one vector.
#define BEGIN_1(r) V s##r = add ? *(V*)(c.at + r * c.pitch) : none;
#define STEP_1(r) s##r += from[row##r] * u;
#define END_1(r) *(V*)(c.at + r * c.pitch) = s##r;
static __attribute__((noinline)) void narrow_tile(Left x, const T* y, long long pitch, Block c, long long count, bool add) {
    const V none = {0};
    const T* from = x.at;
    EACH_ROW(OFFSET)
    EACH_ROW(BEGIN_1)
    for (; count; count--, from += x.column, y += pitch) {
        __asm__("" : "+r"(from));
        const V u = *(const Loose*)y;
        EACH_ROW(STEP_1)
    }
    EACH_ROW(END_1)
}

// c = (add ? c : 0) + x y, where c has `rows` x `columns` numbers, whole tiles, and x `count` columns.
static void product(Left x, Block y, Block c, long long rows, long long columns, long long count, bool add) {
    for (long long k = 0; k < count; k += DEEP) {
        const long long deep = count - k < DEEP ? count - k : DEEP;
        for (long long j = 0; j < columns; j += 2 * LANES)
            for (long long i = 0; i < rows; i += ROWS) {
                const Left part = {x.at + i * x.row + k * x.column, x.row, x.column};
                const Block to = {c.at + i * c.pitch + j, c.pitch};
                (columns - j > LANES ? wide_tile : narrow_tile)(part, y.at + k * y.pitch + j, y.pitch, to, deep, add || k);
            }
    }
}

static inline long long whole(long long n, long long unit) { return (n + unit - 1) / unit * unit; }

// -- what is read and written ------------------------------------------------------------------------------------------

typedef struct {  // matrices of all heads, in whatever memory they lie
    void* at;
    const long long* heads;  // where each begins
    long long row, column;
} Heads;

static inline Heads heads_of(const Word* a) { return (Heads){a[0].p, a[1].p, a[2].n, a[3].n}; }

// to = factor x, for `rows` rows from `first` on, with zeros up to whole tiles.
static void load(Block to, Heads x, long long head, long long first, long long rows, long long columns, T factor) {
    const T* const from = (const T*)x.at + x.heads[head] + first * x.row;
    const long long all = whole(rows, UNIT);
    for (long long i = 0; i < all; i++) {
        T* const row = to.at + i * to.pitch;
        if (i >= rows) { EACH for (long long c = 0; c < to.pitch; c++) row[c] = 0; continue; }
        if (x.column == 1) EACH for (long long c = 0; c < columns; c++) row[c] = factor * from[i * x.row + c];
        else EACH for (long long c = 0; c < columns; c++) row[c] = factor * from[i * x.row + c * x.column];
        for (long long c = columns; c < to.pitch; c++) row[c] = 0;
    }
}

// The whole of a head as it lies there, if that fits and only one strip reads it; else a copy.
static Block loaded(Block copy, Heads x, long long head, long long rows, long long columns, bool once) {
    if (once && x.column == 1 && rows % ROWS == 0 && columns % UNIT == 0) return (Block){(T*)x.at + x.heads[head], x.row};
    load(copy, x, head, 0, rows, columns, 1);
    return copy;
}

// x = factor of the row, times from
static void store(Heads x, long long head, long long first, long long rows, long long columns, Block from, const T* factor) {
    T* const to = (T*)x.at + x.heads[head] + first * x.row;
    for (long long i = 0; i < rows; i++) {
        const T* const row = from.at + i * from.pitch;
        const T f = factor[i];
        if (x.column == 1) EACH for (long long c = 0; c < columns; c++) to[i * x.row + c] = f * row[c];
        else EACH for (long long c = 0; c < columns; c++) to[i * x.row + c * x.column] = f * row[c];
    }
}

static void transpose(Block to, Block from, long long rows, long long columns) {
    for (long long i = 0; i < rows; i++)
        for (long long c = 0; c < columns; c++) to.at[c * to.pitch + i] = from.at[i * from.pitch + c];
}

// A place in scratch.
static Block block(char** free, long long rows, long long columns) {
    const Block made = {(T*)*free, whole(columns, UNIT)};
    *free += whole(rows, UNIT) * made.pitch * sizeof(T);
    return made;
}

static inline Left plain(Block x) { return (Left){x.at, x.pitch, 1}; }
static inline Left transposed(Block x) { return (Left){x.at, 1, x.pitch}; }

// -- the scores of a strip ---------------------------------------------------------------------------------------------

typedef struct {
    Heads q, k, v, seen, bias;  // the last two may be at 0
    T* total;
    long long s, t, d, e;  // queries, keys, features of both, features of values
    T scale;
    bool causal;
} Attention;

enum { WORDS = 27 };  // of a block of arguments

static Attention attention_of(const Word* a) {
    return (Attention){heads_of(a), heads_of(a + 4), heads_of(a + 8), heads_of(a + 12), heads_of(a + 16),
                       a[20].p, a[21].n, a[22].n, a[23].n, a[24].n, a[25].x, a[26].n};
}

typedef struct {
    long long head, first, rows;  // of the queries
    long long from, to;  // the keys that some of them see
    T hidden[STRIP];  // the score of a key that a query does not see: 0 where it sees none at all, else -inf
} Strip;

static Strip strip_of(const Attention* x, long long head, long long first) {
    const long long rows = x->s - first < STRIP ? x->s - first : STRIP;
    Strip made = {head, first, rows, x->t, 0};
    for (long long i = 0; i < STRIP; i++) made.hidden[i] = -INFINITY;
    for (long long i = 0; i < rows; i++) {
        const long long past = x->causal && first + i + 1 < x->t ? first + i + 1 : x->t;
        long long from = 0, to = past;
        if (x->seen.at) {
            const unsigned char* const seen = (unsigned char*)x->seen.at + x->seen.heads[head] + (first + i) * x->seen.row;
            while (from < past && !seen[from * x->seen.column]) from++;
            while (to > from && !seen[(to - 1) * x->seen.column]) to--;
        }
        if (from == past) made.hidden[i] = 0, from = 0, to = x->t;
        if (from < made.from) made.from = from;
        if (to > made.to) made.to = to;
    }
    made.from -= made.from % ROWS;  // whole tiles, as far as there are keys
    made.to = whole(made.to, ROWS) < x->t ? whole(made.to, ROWS) : x->t;
    return made;
}

// Bias and masks for the keys `from` to `to`. What is not the same for all queries lies the other way round, hence the
// small blocks.
static void hide(const Attention* x, const Strip* strip, Block scores, long long from, long long to) {
    const Heads seen = x->seen, bias = x->bias;
    const unsigned char* const sees = (unsigned char*)seen.at + (seen.at ? seen.heads[strip->head] + strip->first * seen.row : 0);
    const T* const added = (T*)bias.at + (bias.at ? bias.heads[strip->head] + strip->first * bias.row : 0);
    T* const at = scores.at - from * scores.pitch;
    enum { SIDE = 16 };
    for (long long start = from; start < to; start += SIDE) {
        const long long stop = start + SIDE < to ? start + SIDE : to;
        for (long long i = 0; i < strip->rows && bias.at; i++)
            for (long long j = start; j < stop; j++) at[j * scores.pitch + i] += added[i * bias.row + j * bias.column];
        for (long long i = 0; i < strip->rows && seen.at && seen.row; i++)
            for (long long j = start; j < stop; j++)
                if (!sees[i * seen.row + j * seen.column]) at[j * scores.pitch + i] = strip->hidden[i];
    }
    for (long long j = from; j < to; j++) {
        const bool all = seen.at && !seen.row && !sees[j * seen.column];
        const long long past = all ? strip->rows : x->causal ? j - strip->first : 0;
        const long long end = past < strip->rows ? past : strip->rows;
        EACH for (long long i = 0; i < end; i++) at[j * scores.pitch + i] = strip->hidden[i];
    }
}

// scores^T of the keys `from` to `to` of a strip, whose scaled queries lie transposed
static void scores_of(const Attention* x, const Strip* strip, Block k, Block q, Block scores, long long from, long long to) {
    const Left keys = {k.at + from * k.pitch, k.pitch, 1};
    product(keys, q, scores, whole(to - from, ROWS), scores.pitch, x->d, false);
    hide(x, strip, scores, from, to);
}

// -- forward -----------------------------------------------------------------------------------------------------------

// The larger of each two numbers; a NaN stays. As a loop over an array it would be computed number by number.
static inline V larger(V a, V b) {
    typedef __typeof__(a >= b) Mask;
    const Mask first = (a >= b) | (a != a);
    return (V)(((Mask)a & first) | ((Mask)b & ~first));
}

// scores -> powers, the logarithm of their sum for each query, and its inverse
static void softmax(Block scores, long long keys, T* total, T* inverse) {
    for (long long c = 0; c < scores.pitch; c += LANES) {
        V highest = *(V*)(scores.at + c);
        for (long long j = 1; j < keys; j++) highest = larger(highest, *(V*)(scores.at + j * scores.pitch + c));
        T most[LANES], sum[LANES] = {0};
        for (int l = 0; l < LANES; l++) most[l] = highest[l];
        for (long long j = 0; j < keys; j++) {
            T* const row = scores.at + j * scores.pitch + c;
            EACH for (int l = 0; l < LANES; l++) {
                row[l] = exp(row[l] - most[l]);
                sum[l] += row[l];
            }
        }
        for (int l = 0; l < LANES; l++) total[c + l] = most[l] + log(sum[l]), inverse[c + l] = 1 / sum[l];
    }
}

// Jobs are the strips of all heads.
void attention(const Word* a, long long first, long long last, char* scratch) {
    const Attention x = attention_of(a);
    const Heads y = heads_of(a + WORDS);
    const long long strips = (x.s + STRIP - 1) / STRIP, most = x.s < STRIP ? x.s : STRIP;
    const Block k_copy = block(&scratch, x.t, x.d), v_copy = block(&scratch, x.t, x.e);
    Block k = k_copy, v = v_copy;
    const Block rows = block(&scratch, most, x.d > x.e ? x.d : x.e), q = block(&scratch, x.d, most);
    Block scores = block(&scratch, x.t, most);
    T total[STRIP], inverse[STRIP];
    for (long long job = first, present = -1; job < last; job++) {
        const Strip strip = strip_of(&x, job / strips, job % strips * STRIP);
        if (strip.head != present) {
            present = strip.head;
            k = loaded(k_copy, x.k, present, x.t, x.d, strips == 1);
            v = loaded(v_copy, x.v, present, x.t, x.e, strips == 1);
        }
        const long long lanes = whole(strip.rows, LANES), keys = strip.to - strip.from;
        const Block queries = {rows.at, whole(x.d, UNIT)}, turned = {q.at, lanes}, result = {rows.at, whole(x.e, UNIT)};
        scores.pitch = lanes;
        load(queries, x.q, strip.head, strip.first, strip.rows, x.d, x.scale);
        transpose(turned, queries, lanes, x.d);
        scores_of(&x, &strip, k, turned, scores, strip.from, strip.to);
        softmax(scores, keys, total, inverse);
        const Block values = {v.at + strip.from * v.pitch, v.pitch};
        product(transposed(scores), values, result, whole(strip.rows, ROWS), result.pitch, keys, false);
        store(y, strip.head, strip.first, strip.rows, x.e, result, inverse);
        for (long long i = 0; i < strip.rows; i++) x.total[strip.head * x.s + strip.first + i] = total[i];
    }
}

// -- the gradient ------------------------------------------------------------------------------------------------------

enum { CHUNK = 256 };  // keys at a time, so that a strip's weights and slopes stay in the cache

// scores -> weights; the slopes of the weights -> those of the scores
static void slopes_of(Block scores, Block slopes, long long keys, const T* total, const T* shift, const T* hidden) {
    for (long long c = 0; c < scores.pitch; c += LANES)
        for (long long j = 0; j < keys; j++) {
            T* const weights = scores.at + j * scores.pitch + c;
            T* const slope = slopes.at + j * slopes.pitch + c;
            EACH for (int l = 0; l < LANES; l++) {
                const T weight = exp(weights[l] - total[c + l]);
                weights[l] = weight;
                slope[l] = hidden[c + l] == 0 ? 0 : weight * (slope[l] - shift[c + l]);
            }
        }
}

// The sums over g y of each query.
static void shifts_of(Block g, Block y, long long rows, T* shift) {
    for (long long i = 0; i < rows; i++) {
        T sum[UNIT] = {0};
        for (long long c = 0; c < g.pitch; c += UNIT)
            EACH for (int l = 0; l < UNIT; l++) sum[l] += g.at[i * g.pitch + c + l] * y.at[i * y.pitch + c + l];
        for (int half = UNIT / 2; half; half /= 2)
            for (int l = 0; l < half; l++) sum[l] += sum[l + half];
        shift[i] = sum[0];
    }
}

// Jobs are heads.
void attention_dx(const Word* a, long long first, long long last, char* scratch) {
    const Attention x = attention_of(a);
    const Heads given = heads_of(a + WORDS), made = heads_of(a + WORDS + 4);
    const Heads to_q = heads_of(a + WORDS + 8), to_k = heads_of(a + WORDS + 12), to_v = heads_of(a + WORDS + 16);
    const long long most = x.s < STRIP ? x.s : STRIP, chunk = x.t < CHUNK ? x.t : CHUNK;
    const Block k_copy = block(&scratch, x.t, x.d), v_copy = block(&scratch, x.t, x.e);
    const Block dk = block(&scratch, x.t, x.d), dv = block(&scratch, x.t, x.e);
    const Block q = block(&scratch, most, x.d), g = block(&scratch, most, x.e), y = block(&scratch, most, x.e);
    const Block dq = block(&scratch, most, x.d);
    Block turned_q = block(&scratch, x.d, most), turned_g = block(&scratch, x.e, most);
    Block scores = block(&scratch, chunk, most), slopes = block(&scratch, chunk, most);
    T total[STRIP] = {0}, shift[STRIP] = {0}, scale[STRIP], ones[CHUNK];
    for (int i = 0; i < STRIP; i++) scale[i] = x.scale;
    for (int i = 0; i < CHUNK; i++) ones[i] = 1;
    for (long long head = first; head < last; head++) {
        const Block k = loaded(k_copy, x.k, head, x.t, x.d, x.s <= STRIP);
        const Block v = loaded(v_copy, x.v, head, x.t, x.e, x.s <= STRIP);
        memset(dk.at, 0, whole(x.t, UNIT) * dk.pitch * sizeof(T));
        memset(dv.at, 0, whole(x.t, UNIT) * dv.pitch * sizeof(T));
        for (long long start = 0; start < x.s; start += STRIP) {
            const Strip strip = strip_of(&x, head, start);
            const long long lanes = whole(strip.rows, LANES);
            scores.pitch = slopes.pitch = turned_q.pitch = turned_g.pitch = lanes;
            load(q, x.q, head, start, strip.rows, x.d, x.scale);
            load(g, given, head, start, strip.rows, x.e, 1);
            load(y, made, head, start, strip.rows, x.e, 1);
            transpose(turned_q, q, lanes, x.d);
            transpose(turned_g, g, lanes, x.e);
            shifts_of(g, y, lanes, shift);
            for (long long i = 0; i < strip.rows; i++) total[i] = x.total[head * x.s + start + i];
            for (long long i = strip.rows; i < STRIP; i++) total[i] = 0;
            for (long long from = strip.from; from < strip.to; from += CHUNK) {
                const long long to = from + CHUNK < strip.to ? from + CHUNK : strip.to, keys = to - from;
                const Left values = {v.at + from * v.pitch, v.pitch, 1};
                const Block keys_in = {k.at + from * k.pitch, k.pitch};
                const Block dk_in = {dk.at + from * dk.pitch, dk.pitch}, dv_in = {dv.at + from * dv.pitch, dv.pitch};
                scores_of(&x, &strip, k, turned_q, scores, from, to);
                product(values, turned_g, slopes, whole(keys, ROWS), lanes, x.e, false);
                slopes_of(scores, slopes, keys, total, shift, strip.hidden);
                product(plain(scores), g, dv_in, whole(keys, ROWS), dv.pitch, lanes, true);
                product(plain(slopes), q, dk_in, whole(keys, ROWS), dk.pitch, lanes, true);
                product(transposed(slopes), keys_in, dq, whole(strip.rows, ROWS), dq.pitch, keys, from > strip.from);
            }
            store(to_q, head, start, strip.rows, x.d, dq, scale);
        }
        for (long long start = 0; start < x.t; start += CHUNK) {
            const long long rows = x.t - start < CHUNK ? x.t - start : CHUNK;
            const Block dk_in = {dk.at + start * dk.pitch, dk.pitch}, dv_in = {dv.at + start * dv.pitch, dv.pitch};
            store(to_k, head, start, rows, x.d, dk_in, ones);
            store(to_v, head, start, rows, x.e, dv_in, ones);
        }
    }
}
