// The recurrence as one would write it down, and the FMA peak of one core. Compiled by peers.py with
// -O3 -march=native -ffast-math.

#include <math.h>
#include <stdint.h>

// q, k, g [B, T, H, K], v, o [B, T, H, V], beta [B, T, H]; the state [B, H, K, V] is changed in place.
void recurrence(int64_t batch, int64_t time, int64_t heads, int64_t keys, int64_t values, float scale,
                const float *restrict q, const float *restrict k, const float *restrict v, const float *restrict g,
                const float *restrict beta, float *restrict state, float *restrict o) {
    float u[values];
    for (int64_t b = 0; b < batch; b++) {
        for (int64_t h = 0; h < heads; h++) {
            float *restrict s = state + (b * heads + h) * keys * values;
            for (int64_t t = 0; t < time; t++) {
                const int64_t token = (b * time + t) * heads + h;
                const float *restrict qt = q + token * keys, *restrict kt = k + token * keys;
                const float *restrict gt = g + token * keys, *restrict vt = v + token * values;
                float *restrict ot = o + token * values;
                for (int64_t j = 0; j < values; j++) u[j] = vt[j];
                for (int64_t i = 0; i < keys; i++) {
                    const float decay = expf(gt[i]), key = kt[i];
                    for (int64_t j = 0; j < values; j++) {
                        s[i * values + j] *= decay;
                        u[j] -= key * s[i * values + j];
                    }
                }
                for (int64_t j = 0; j < values; j++) u[j] *= beta[token], ot[j] = 0;
                for (int64_t i = 0; i < keys; i++) {
                    const float key = kt[i], query = scale * qt[i];
                    for (int64_t j = 0; j < values; j++) {
                        s[i * values + j] += key * u[j];
                        ot[j] += query * s[i * values + j];
                    }
                }
            }
        }
    }
}

// Multiply-adds, each on the result of the one before, in 12 vectors of the widest kind that begin with the numbers of
// `sums`: returns how many.
int64_t fma_chains(int64_t rounds, float x, float *sums) {
#ifdef __AVX512F__
    enum { LANES = 16 };
#else
    enum { LANES = 8 };
#endif
    typedef float vector __attribute__((vector_size(4 * LANES)));
    vector chains[12];
    for (int c = 0; c < 12; c++) chains[c] = (vector){0} + sums[c];
    for (int64_t n = 0; n < rounds; n++) {
        for (int c = 0; c < 12; c++) chains[c] = chains[c] * x + 1.0f;
    }
    for (int c = 0; c < 12; c++) sums[c] = chains[c][0];
    return rounds * 12 * LANES;
}
