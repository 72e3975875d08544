// Sums over what lies before and behind some axes, as of a convolution's slopes for each channel.
//
// A job is one sum: neighbors go to lanes in turn, block by block, and the lanes are added as a tree at the end.

enum { LANES = 32 };

void sum_around(const Word* a, long long first, long long last, char* scratch) {
    T* const y = a[0].p;
    const T* const x = a[1].p;
    const long long before = a[2].n, kept = a[3].n, behind = a[4].n;
    for (long long k = first; k < last; k++) {
        T lanes[LANES] = {};
        for (long long n = 0; n < before; n++) {
            const T* const row = x + (n * kept + k) * behind;
            long long start = 0;
            for (; start + LANES <= behind; start += LANES)
                EACH for (int l = 0; l < LANES; l++) lanes[l] += row[start + l];
            for (int l = 0; l < behind - start; l++) lanes[l] += row[start + l];
        }
        for (int width = LANES / 2; width; width /= 2)
            for (int l = 0; l < width; l++) lanes[l] += lanes[l + width];
        y[k] = lanes[0];
    }
}
