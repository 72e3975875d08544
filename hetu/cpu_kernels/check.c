// What has to hold of the values of arrays before a step goes on.

// Whether integers lie in 0 ... size - 1; the last word counts how often they did not.
void in_range(const Word* a, long long first, long long last, char* scratch) {
    const T* const ids = a[0].p;
    const long long size = a[2].n;
    long long outside = 0;
    for (long long k = 0; k < a[1].n; k++) outside += ids[k] < 0 || ids[k] >= size;
    *(long long*)a[3].p = outside;
}
