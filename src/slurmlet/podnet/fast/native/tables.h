/* What netfast.c looks up: pods and Services as Python has mirrored them, announcements as they came. */
/* Tables: one map of numbers, linear probing, no tombstones. Keys are never 0. */
static size_t home(const struct map *map, uint64_t key) { return (key * 0x9e3779b97f4a7c15ull >> 20) & map->mask; }
static struct slot *find(const struct map *map, uint64_t key) {
    size_t at = home(map, key);
    while (map->slots[at].key && map->slots[at].key != key) at = (at + 1) & map->mask;
    return &map->slots[at];
}
static uint64_t get(const struct map *map, uint64_t key) { return find(map, key)->value; }
static int grow(struct map *map, size_t size) {
    struct map larger = {calloc(size, sizeof(struct slot)), size - 1, map->used};
    if (!larger.slots) return -1;
    for (size_t i = 0; map->slots && i <= map->mask; i++)
        if (map->slots[i].key) *find(&larger, map->slots[i].key) = map->slots[i];
    free(map->slots);
    *map = larger;
    return 0;
}
static int put(struct map *map, uint64_t key, uint64_t value) {
    if (2 * (map->used + 1) > map->mask && grow(map, 2 * (map->mask + 1))) return -1;
    struct slot *slot = find(map, key);
    map->used += !slot->key;
    *slot = (struct slot){key, value};
    return 0;
}
static uint64_t take(struct map *map, uint64_t key) {
    struct slot *slot = find(map, key);
    uint64_t value = slot->value;
    if (!slot->key) return 0;
    map->used--;
    size_t hole = (size_t)(slot - map->slots), at = hole;
    for (;;) {
        at = (at + 1) & map->mask;
        if (!map->slots[at].key) break;
        /* Whatever would not be found any more behind the hole moves into it. */
        if (((at - home(map, map->slots[at].key)) & map->mask) >= ((at - hole) & map->mask)) {
            map->slots[hole] = map->slots[at];
            hole = at;
        }
    }
    map->slots[hole] = (struct slot){0, 0};
    return value;
}

/* Announcements that wait for their connection; the oldest goes when there are too many. */
static uint64_t key_of(uint32_t host_ip, uint16_t source_port, uint16_t port) {
    return (uint64_t)host_ip << 32 | (uint32_t)source_port << 16 | port;
}
static uint32_t bucket(uint64_t key) { return (uint32_t)(key * 0x9e3779b97f4a7c15ull >> 40) % EXPECTED; }
static void unlink_expected(struct netfast *nf, uint32_t at) {
    struct expected *e = &nf->expected[at];
    uint32_t *link = &nf->buckets[bucket(e->key)];
    while (*link != at) link = &nf->expected[*link].next;
    *link = e->next;
    *(e->older == NONE ? &nf->oldest : &nf->expected[e->older].newer) = e->newer;
    *(e->newer == NONE ? &nf->newest : &nf->expected[e->newer].older) = e->older;
    e->next = nf->unused;
    nf->unused = at;
}
static uint32_t find_expected(const struct netfast *nf, uint64_t key) {
    uint32_t at = nf->buckets[bucket(key)];
    while (at != NONE && nf->expected[at].key != key) at = nf->expected[at].next;
    return at;
}
static void expect(struct netfast *nf, struct expected what) {
    uint32_t at = find_expected(nf, what.key);
    if (at != NONE) unlink_expected(nf, at);
    else if (nf->unused == NONE && nf->fresh == EXPECTED) unlink_expected(nf, nf->oldest);
    if (nf->unused != NONE) {
        at = nf->unused;
        nf->unused = nf->expected[at].next;
    } else {
        at = nf->fresh++;
    }
    uint32_t *first = &nf->buckets[bucket(what.key)];
    what.next = *first;
    what.older = nf->newest;
    what.newer = NONE;
    *(nf->newest == NONE ? &nf->oldest : &nf->expected[nf->newest].newer) = at;
    nf->newest = *first = at;
    nf->expected[at] = what;
}

/* Datagrams: docs/network.md. Only announcements are read here. */
#define ANNOUNCE 2
#define ANNOUNCE_BYTES 23
#define MAX_SKEW_MS 300000
struct __attribute__((packed)) announcement {
    uint8_t kind;
    uint64_t time_ms;
    uint32_t source_ip;
    uint16_t source_port;
    uint32_t ip;
    uint16_t port, host_source_port;
    uint8_t tag[TAG];
};
static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}
static uint32_t now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint32_t)now.tv_sec;
}
static int64_t since_ms(const struct timespec *then) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)(now.tv_sec - then->tv_sec) * 1000 + (now.tv_nsec - then->tv_nsec) / 1000000;
}
static void announce(struct netfast *nf, uint64_t where, uint32_t ip, uint16_t port, uint16_t source_port) {
    struct announcement a = {.kind = ANNOUNCE, .time_ms = htobe64((uint64_t)now_ms()), .source_ip = htonl(nf->ip),
                             .source_port = htons(source_port), .ip = htonl(ip), .port = htons(port),
                             .host_source_port = htons(source_port)};
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)(where >> 16)),
                             .sin_addr.s_addr = htonl((uint32_t)(where >> 32))};
    tag(nf, (const uint8_t *)&a, ANNOUNCE_BYTES, a.tag);
    /* What does not go out is asked for by the other side. */
    (void)!sendto(nf->udp, &a, sizeof a, MSG_DONTWAIT, (struct sockaddr *)&to, sizeof to);
}
/* The key of an announcement that came, now expected; 0: it is something else. */
static uint64_t announced(struct netfast *nf, ssize_t bytes) {
    struct announcement a;
    uint8_t right[TAG], differ = 0;
    if (nf->holding || bytes != sizeof a || nf->room[0] != ANNOUNCE) return 0;
    memcpy(&a, nf->room, sizeof a);
    tag(nf, nf->room, ANNOUNCE_BYTES, right);
    for (int i = 0; i < TAG; i++) differ |= right[i] ^ a.tag[i];
    int64_t skew = now_ms() - (int64_t)be64toh(a.time_ms);
    if (differ || skew > MAX_SKEW_MS || skew < -MAX_SKEW_MS) return 0;
    nf->look = 1;
    uint64_t key = key_of(ntohl(nf->sender.sin_addr.s_addr), ntohs(a.host_source_port), ntohs(a.port));
    expect(nf, (struct expected){.key = key, .source_ip = ntohl(a.source_ip), .source_port = ntohs(a.source_port),
                                 .ip = ntohl(a.ip), .port = ntohs(a.port), .came_s = now_s()});
    return key;
}
#define MAX_AT_ONCE 64
/* The next datagram that is Python's (its size), or 0; also when the announcement that is looked for has come. */
static int receive_until(struct netfast *nf, uint64_t wanted) {
    int size = nf->pending;
    nf->pending = 0;
    for (int i = 0; !size && i < MAX_AT_ONCE; i++) {
        socklen_t bytes = sizeof nf->sender;
        ssize_t got = recvfrom(nf->udp, nf->room, (size_t)nf->room_bytes, MSG_DONTWAIT, (struct sockaddr *)&nf->sender, &bytes);
        if (got < 0) return 0;
        uint64_t key = got ? announced(nf, got) : 0;
        if (key && key == wanted) return 0;
        if (got && !key) size = (int)got;
    }
    return size;
}
int netfast_receive(struct netfast *nf) { return receive_until(nf, 0); }
uint64_t netfast_sender(const struct netfast *nf) {
    return (uint64_t)ntohl(nf->sender.sin_addr.s_addr) << 16 | ntohs(nf->sender.sin_port);
}
static int claim(struct netfast *nf, uint64_t key, struct expected *out) {
    uint32_t at = find_expected(nf, key);
    if (at == NONE) return 0;
    *out = nf->expected[at];
    unlink_expected(nf, at);
    return now_s() - out->came_s < EXPECTED_S;
}
int netfast_claim(struct netfast *nf, uint32_t ip, uint32_t source_port, uint32_t port, uint32_t *out) {
    struct expected e;
    if (!claim(nf, key_of(ip, (uint16_t)source_port, (uint16_t)port), &e)) return 0;
    out[0] = e.source_ip, out[1] = e.source_port, out[2] = e.ip, out[3] = e.port;
    return 1 + (int)e.inner;
}
void netfast_expect(struct netfast *nf, uint32_t host_ip, uint32_t host_port, uint32_t source_ip, uint32_t source_port,
                    uint32_t ip, uint32_t port, uint32_t inner) {
    nf->look = 1;
    expect(nf, (struct expected){.key = key_of(host_ip, (uint16_t)host_port, (uint16_t)port), .source_ip = source_ip, .ip = ip,
                                 .source_port = (uint16_t)source_port, .port = (uint16_t)port, .came_s = now_s(),
                                 .inner = inner});
}
