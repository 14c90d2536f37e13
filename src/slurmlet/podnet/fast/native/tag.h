/* blake2b, RFC 7693, for keyed tags of 16 bytes over messages of one block. */
static const uint64_t IV[8] = {
    0x6a09e667f3bcc908ull, 0xbb67ae8584caa73bull, 0x3c6ef372fe94f82bull, 0xa54ff53a5f1d36f1ull,
    0x510e527fade682d1ull, 0x9b05688c2b3e6c1full, 0x1f83d9abfb41bd6bull, 0x5be0cd19137e2179ull,
};
static const uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};
static uint64_t turned(uint64_t x, int by) { return x >> by | x << (64 - by); }
static void mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = turned(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = turned(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 63);
}
static void compress(uint64_t *h, const uint8_t *block, uint64_t total, int last) {
    uint64_t v[16], m[16];
    for (int i = 0; i < 16; i++) {
        memcpy(&m[i], block + 8 * i, 8);
        m[i] = le64toh(m[i]);
        v[i] = i < 8 ? h[i] : IV[i - 8];
    }
    v[12] ^= total;
    if (last) v[14] = ~v[14];
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = SIGMA[round % 10];
        for (int i = 0; i < 4; i++) mix(v, i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
        for (int i = 0; i < 4; i++)
            mix(v, i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
    }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}
#define BLOCK 128
#define TAG 16
static void keyed(uint64_t *h, const uint8_t *key, int key_bytes) {
    uint8_t block[BLOCK] = {0};
    memcpy(block, key, (size_t)key_bytes);
    memcpy(h, IV, sizeof IV);
    h[0] ^= 0x01010000u ^ (uint64_t)key_bytes << 8 ^ TAG;
    compress(h, block, BLOCK, 0);
}
static void tag(const struct netfast *nf, const uint8_t *message, size_t bytes, uint8_t *out) {
    uint64_t h[8];
    uint8_t block[BLOCK] = {0};
    memcpy(h, nf->hash, sizeof h);
    memcpy(block, message, bytes);
    compress(h, block, BLOCK + bytes, 1);
    for (int i = 0; i < 2; i++) h[i] = htole64(h[i]);
    memcpy(out, h, TAG);
}
