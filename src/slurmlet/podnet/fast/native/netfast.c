/* The trapped calls that every connection of a pod makes, answered without Python: the hot spot of netd.
 *
 * Loaded into netd by native/library.py and called in its one thread. It answers only what it is sure of: sockets that it
 * made or accepted itself, pods and Services that Python has mirrored here, announcements whose tag is right. Everything
 * else is handed to Python, before anything was done, or as one of the events below. What it did is told by records.
 * It must never wait for a program, keep a descriptor that nobody waits for, or be the only one who knows a name.
 */
#include "types.h"
#include "tag.h"
#include "tables.h"

/* The process that waits: its descriptors, its memory, its answer. */
static int process_of(uint32_t thread) {
    char line[128];
    int found = (int)thread;
    snprintf(line, sizeof line, "/proc/%u/status", thread);
    FILE *file = fopen(line, "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "Tgid: %d", &found) == 1) break;
    if (file) fclose(file);
    return found;
}
static int copied(struct netfast *nf, uint32_t pid, uint64_t fd) {
    struct pidfd *p = &nf->pidfds[pid % PIDFDS];
    if (p->pid == pid && p->fd >= 0) {
        int copy = (int)syscall(SYS_pidfd_getfd, p->fd, (int)fd, 0);
        if (copy >= 0 || errno != ESRCH) return copy;
    }
    if (p->fd >= 0) close(p->fd);
    p->fd = -1;
    if (nf->by_thread) {
        p->fd = (int)syscall(SYS_pidfd_open, pid, PIDFD_THREAD);
        /* Before Linux 6.9 there are pidfds of processes only. */
        if (p->fd < 0 && errno == EINVAL) nf->by_thread = 0;
    }
    if (!nf->by_thread) p->fd = (int)syscall(SYS_pidfd_open, process_of(pid), 0);
    p->pid = pid;
    return p->fd < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, p->fd, (int)fd, 0);
}
static int read_memory(uint32_t pid, uint64_t from, void *to, size_t bytes) {
    struct iovec local = {to, bytes}, remote = {(void *)(uintptr_t)from, bytes};
    return process_vm_readv((pid_t)pid, &local, 1, &remote, 1, 0) == (ssize_t)bytes ? 0 : -1;
}
static uint64_t cookie_of(int fd) {
    uint64_t cookie = 0;
    socklen_t bytes = sizeof cookie;
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &bytes) ? 0 : cookie;
}
static int answered(int notify_fd, uint64_t id, int error) {
    struct answer a = {id, 0, -error, 0};
    return ioctl(notify_fd, NOTIF_SEND, &a);
}
static int given(int notify_fd, uint64_t id, int fd, int cloexec) {
    struct addfd a = {id, ADDFD_SEND, (uint32_t)fd, 0, cloexec ? O_CLOEXEC : 0};
    /* The number it got there, or -1. */
    return ioctl(notify_fd, NOTIF_ADDFD, &a) < 0;
}
static int valid(int notify_fd, uint64_t id) { return !ioctl(notify_fd, NOTIF_ID_VALID, &id); }

/* Names. */
static socklen_t encode(struct sockaddr_storage *out, int family, uint32_t ip, uint16_t port) {
    memset(out, 0, sizeof(struct sockaddr_in6));
    if (family == AF_INET) {
        struct sockaddr_in *four = (struct sockaddr_in *)out;
        four->sin_family = AF_INET, four->sin_port = htons(port), four->sin_addr.s_addr = htonl(ip);
        return sizeof *four;
    }
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)out;
    six->sin6_family = AF_INET6, six->sin6_port = htons(port);
    six->sin6_addr.s6_addr[10] = six->sin6_addr.s6_addr[11] = 0xff;
    ip = htonl(ip);
    memcpy(&six->sin6_addr.s6_addr[12], &ip, 4);
    return sizeof *six;
}
static int decode(const struct sockaddr_storage *in, uint32_t *ip, uint16_t *port) {
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)in;
    const struct sockaddr_in *four = (const struct sockaddr_in *)in;
    *port = ntohs(four->sin_port);
    if (in->ss_family == AF_INET) {
        *ip = ntohl(four->sin_addr.s_addr);
        return 0;
    }
    if (in->ss_family != AF_INET6 || memcmp(six->sin6_addr.s6_addr, mapped, 12)) return -1;
    memcpy(ip, &six->sin6_addr.s6_addr[12], 4);
    *ip = ntohl(*ip);
    return 0;
}
static int told(uint32_t pid, uint64_t address, uint64_t size, int family, uint32_t ip, uint16_t port) {
    struct sockaddr_storage name;
    socklen_t bytes = encode(&name, family, ip, port);
    int32_t place;
    if (read_memory(pid, size, &place, 4) || place < 0) return -1;
    size_t fits = (size_t)place < bytes ? (size_t)place : bytes;
    struct iovec local[2] = {{&name, fits}, {&bytes, 4}};
    struct iovec remote[2] = {{(void *)(uintptr_t)address, fits}, {(void *)(uintptr_t)size, 4}};
    return process_vm_writev((pid_t)pid, local, 2, remote, 2, 0) == (ssize_t)fits + 4 ? 0 : -1;
}

/* What is known, and what is told to Python. */
static struct known *place_of(struct netfast *nf, uint64_t cookie) {
    return &nf->known[(cookie * 0x9e3779b97f4a7c15ull >> 40) % KNOWN];
}
static struct known *known(struct netfast *nf, uint64_t cookie) {
    struct known *k = place_of(nf, cookie);
    return cookie && k->cookie == cookie ? k : NULL;
}
void netfast_forget(struct netfast *nf, uint64_t cookie) {
    struct known *k = known(nf, cookie);
    if (k) k->cookie = 0;
}
static void dirty(struct netfast *nf) {
    if (nf->state.dirty) return;
    nf->state.dirty = 1;
    clock_gettime(CLOCK_MONOTONIC, &nf->dirty_since);
}
static void count(struct netfast *nf, int what) {
    nf->state.counts[what]++;
    dirty(nf);
}
static void recorded(struct netfast *nf, struct record record) {
    nf->state.records[nf->state.recorded++] = record;
    dirty(nf);
}
static int to_python(struct event *ev, int kind, int notify_fd, const struct notification *call) {
    ev->call = *call;
    ev->notify_fd = notify_fd;
    return ev->kind = kind;
}
static int hold_of(struct netfast *nf, int kind, int fd, uint32_t value) {
    uint64_t data = (uint64_t)kind << 56 | (uint64_t)(uint32_t)fd | (uint64_t)value << 32;
    struct epoll_event event = {kind == REFUSED ? EPOLLOUT : EPOLLIN, {.u64 = data}};
    return epoll_ctl(nf->epoll, EPOLL_CTL_ADD, fd, &event);
}

/* Announcements come one with each connection, and accept() reads them itself: waking up for each would be half of its price.
 * So after some that nobody waits for, we do not listen for more; for a moment only, as others may come that are for Python. */
#define DEAF_MS 1
static void listen_for_datagrams(struct netfast *nf, int wanted) {
    if (nf->deaf != wanted) return;
    struct epoll_event event = {wanted ? EPOLLIN : 0, {.u64 = (uint64_t)DATAGRAM << 56 | (uint64_t)(uint32_t)nf->udp}};
    epoll_ctl(nf->epoll, EPOLL_CTL_MOD, nf->udp, &event);
    nf->deaf = !wanted;
    clock_gettime(CLOCK_MONOTONIC, &nf->deaf_since);
}

/* Calls that wait. */
static uint32_t new_waiter(struct netfast *nf, int notify_fd, const struct notification *call) {
    for (uint32_t i = 0; i < nf->waiters; i++) {
        struct waiter *w = &nf->waiting[i];
        if (w->used) continue;
        *w = (struct waiter){.notify_fd = notify_fd, .fd = -1, .next = NONE, .made = -1, .used = 1};
        nf->journal[i + 1] = *call;
        nf->state.waiting++;
        dirty(nf);
        return i;
    }
    return NONE;
}
static void end_waiter(struct netfast *nf, uint32_t i) {
    struct waiter *w = &nf->waiting[i];
    if (w->fd >= 0) {
        if (!w->accepts) epoll_ctl(nf->epoll, EPOLL_CTL_DEL, w->fd, NULL);
        close(w->fd);
    }
    nf->state.held -= w->made >= 0;
    nf->journal[i + 1].id = 0;
    w->used = 0;
    nf->state.waiting--;
}
static struct listener *listener(struct netfast *nf, uint64_t cookie) {
    for (int i = 0; cookie && i < LISTENERS; i++)
        if (nf->listeners[i].cookie == cookie) return &nf->listeners[i];
    return NULL;
}
static void rest(struct netfast *nf, struct listener *l) {
    if (l->first != NONE || l->copy < 0) return;
    epoll_ctl(nf->epoll, EPOLL_CTL_DEL, l->copy, NULL);
    close(l->copy);
    l->copy = -1;
}
static void pop_waiter(struct netfast *nf, struct listener *l) {
    uint32_t i = l->first;
    l->first = nf->waiting[i].next;
    if (l->first == NONE) l->last = NONE;
    end_waiter(nf, i);
}
static void drop_gone(struct netfast *nf, struct listener *l) {
    uint32_t kept = NONE, next;
    for (uint32_t i = l->first; i != NONE; i = next) {
        next = nf->waiting[i].next;
        if (valid(nf->waiting[i].notify_fd, nf->journal[i + 1].id)) {
            kept = i;
            continue;
        }
        *(kept == NONE ? &l->first : &nf->waiting[kept].next) = next;
        end_waiter(nf, i);
    }
    l->last = kept;
    rest(nf, l);
}
/* Interrupted calls do not say goodbye, and our copy of their socket would keep it open. */
void netfast_check(struct netfast *nf) {
    for (int i = 0; i < LISTENERS; i++)
        if (nf->listeners[i].cookie) drop_gone(nf, &nf->listeners[i]);
    for (uint32_t i = 0; i < nf->waiters; i++) {
        struct waiter *w = &nf->waiting[i];
        if (w->used && !w->accepts && !valid(w->notify_fd, nf->journal[i + 1].id)) end_waiter(nf, i);
    }
}

/* socket(). */
static int serve_socket(struct netfast *nf, int notify_fd, const struct notification *call, struct event *ev) {
    int family = (int)call->args[0], type = (int)call->args[1];
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | (type & SOCK_NONBLOCK), IPPROTO_TCP);
    uint64_t cookie = fd < 0 ? 0 : cookie_of(fd);
    if (!cookie) {
        if (fd >= 0) close(fd);
        return to_python(ev, CALL, notify_fd, call);
    }
    if (given(notify_fd, call->id, fd, type & SOCK_CLOEXEC)) {
        /* Gone, or without room: nothing is known of this socket yet, so Python may try another. */
        close(fd);
        return to_python(ev, CALL, notify_fd, call);
    }
    *place_of(nf, cookie) = (struct known){.cookie = cookie, .phase = FRESH, .family = (uint8_t)family};
    count(nf, C_SOCKET);
    close(fd);
    return NOTHING;
}

/* connect(). */
/* Whether the kernel would choose another source address than the one other netds know this host by. */
static int elsewhere(struct netfast *nf, uint32_t host_ip) {
    uint32_t at = (host_ip * 2654435761u >> 16) % HOSTS, ip = 0;
    uint16_t port;
    if (nf->hosts[at].host_ip == host_ip) return nf->hosts[at].elsewhere;
    struct sockaddr_storage name;
    socklen_t bytes = encode(&name, AF_INET, host_ip, 9);
    int probe = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int failed = probe < 0 || connect(probe, (struct sockaddr *)&name, bytes);
    bytes = sizeof name;
    if (!failed) failed = getsockname(probe, (struct sockaddr *)&name, &bytes) || decode(&name, &ip, &port);
    if (probe >= 0) close(probe);
    nf->hosts[at].host_ip = host_ip;
    return nf->hosts[at].elsewhere = !failed && ip != nf->host_ip;
}
static void drop_connecting(struct netfast *nf, uint64_t cookie) {
    for (uint32_t i = 0; nf->state.waiting && i < nf->waiters; i++) {
        struct waiter *w = &nf->waiting[i];
        if (!w->used || w->accepts || w->cookie != cookie) continue;
        answered(w->notify_fd, nf->journal[i + 1].id, EALREADY);
        end_waiter(nf, i);
    }
}
static int overlay_port_of(uint64_t where) { return (int)(where >> 16 & 0xffff); }
/* Where a connection goes: host, overlay port (0: to a host, which nobody is told of), host port; 0: Python knows. */
static uint64_t route(struct netfast *nf, struct waiter *w, struct event *ev) {
    uint32_t ip = w->shown_ip;
    uint16_t port = w->shown_port;
    if (nf->egress || !ip || ip >> 24 == 127 || ip == nf->ip) return 0;
    struct service *s = (struct service *)(uintptr_t)get(&nf->map, TAG_SERVICE | (uint64_t)ip << 16 | port);
    if (s) {
        if (!s->count) return 0;
        uint32_t turn = s->next++ % s->count;
        ev->turn = (int32_t)turn, ev->ip = ip, ev->port = port;
        ip = s->to[turn].ip, port = (uint16_t)s->to[turn].port;
        if (ip == nf->ip) return 0;
    }
    w->real_ip = ip, w->real_port = port;
    if ((ip & nf->pods.mask) == nf->pods.base) return get(&nf->map, TAG_LISTENER | (uint64_t)ip << 16 | port);
    return (ip & nf->services.mask) == nf->services.base || !port ? 0 : (uint64_t)ip << 32 | port;
}
static struct record record_of(const struct netfast *nf, const struct waiter *w, int kind) {
    return (struct record){.cookie = w->cookie, .ip = nf->ip, .peer_ip = w->shown_ip, .real_ip = w->real_ip,
                           .port = w->source_port, .peer_port = w->shown_port, .real_port = w->real_port,
                           .kind = (uint8_t)kind, .family = w->family, .announced = w->announced};
}
static int refused(struct netfast *nf, int notify_fd, const struct notification *call, const struct waiter *w, int fd,
                   struct event *ev) {
    netfast_forget(nf, w->cookie);
    ev->fd = fd, ev->cookie = w->cookie, ev->family = w->family;
    ev->shown_ip = w->shown_ip, ev->shown_port = w->shown_port, ev->real_ip = w->real_ip, ev->real_port = w->real_port;
    return to_python(ev, REFUSED, notify_fd, call);
}
/* The kernel has an end for a connect(): answer it. */
static int ended(struct netfast *nf, int notify_fd, const struct notification *call, const struct waiter *w, int fd,
                 int error, struct event *ev) {
    if (error == ECONNREFUSED) return refused(nf, notify_fd, call, w, fd, ev);
    struct record record = record_of(nf, w, error ? FAILED : MADE_CONNECTED);
    if (error) count(nf, C_FAILED);
    record.undelivered = answered(notify_fd, call->id, error) && !error;
    if (error || record.undelivered) netfast_forget(nf, w->cookie);
    recorded(nf, record);
    close(fd);
    return NOTHING;
}
static int start(struct netfast *nf, int notify_fd, const struct notification *call, struct waiter *w, int fd,
                 uint64_t where, struct event *ev) {
    int flags = fcntl(fd, F_GETFL), blocks = !(flags & O_NONBLOCK), error = 0;
    w->announced = overlay_port_of(where) != 0;
    if (w->announced && elsewhere(nf, (uint32_t)(where >> 32))) {
        /* An address now, a port with connect(): so that ports are shared between connections to different places. */
        w->target_bytes = encode(&w->target, w->family, nf->host_ip, 0);
        setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &(int){1}, sizeof(int));
        (void)!bind(fd, (struct sockaddr *)&w->target, w->target_bytes);
    }
    w->target_bytes = encode(&w->target, w->family, (uint32_t)(where >> 32), (uint16_t)where);
    if (blocks) fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    if (connect(fd, (struct sockaddr *)&w->target, w->target_bytes)) error = errno;
    if (blocks) fcntl(fd, F_SETFL, flags);
    count(nf, C_CONNECT);
    if (error && error != EINPROGRESS) return ended(nf, notify_fd, call, w, fd, error, ev);
    count(nf, w->announced ? C_POD : C_HOST);
    struct sockaddr_storage name;
    socklen_t bytes = sizeof name;
    uint32_t ip = 0;
    getsockname(fd, (struct sockaddr *)&name, &bytes);
    decode(&name, &ip, &w->source_port);
    if (w->announced) announce(nf, where, w->real_ip, w->real_port, w->source_port);
    *place_of(nf, w->cookie) = (struct known){w->cookie, nf->ip, w->shown_ip, w->source_port, w->shown_port, NAMED, w->family};
    struct record record = record_of(nf, w, MADE_CONNECTING);
    if (!blocks) {
        record.undelivered = !!answered(notify_fd, call->id, error);
        if (record.undelivered) netfast_forget(nf, w->cookie);
        recorded(nf, record);
        close(fd);
        return NOTHING;
    }
    struct pollfd ready = {fd, POLLOUT, 0};
    if (error && poll(&ready, 1, 0) == 1) {
        error = connect(fd, (struct sockaddr *)&w->target, w->target_bytes) ? errno : 0;
        if (error == EISCONN) error = 0;
    }
    if (error != EINPROGRESS && error != EALREADY) return ended(nf, notify_fd, call, w, fd, error, ev);
    recorded(nf, record);
    struct timeval patience = {0, 0};
    bytes = sizeof patience;
    getsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, &bytes);
    uint32_t i = patience.tv_sec || patience.tv_usec ? NONE : new_waiter(nf, notify_fd, call);
    if (i == NONE || hold_of(nf, REFUSED, fd, i)) {
        /* As if it had been called again: Python finds it under way and waits for its end. */
        if (i != NONE) end_waiter(nf, i);
        nf->state.counts[C_CONNECT]--;
        close(fd);
        return to_python(ev, CALL, notify_fd, call);
    }
    w->notify_fd = notify_fd, w->fd = fd, w->used = 1, w->next = NONE, w->made = -1;
    nf->waiting[i] = *w;
    return NOTHING;
}
static int serve_connect(struct netfast *nf, int notify_fd, const struct notification *call, struct event *ev) {
    struct waiter w = {.accepts = 0};
    struct sockaddr_storage name;
    int fd = copied(nf, call->pid, call->args[0]);
    if (fd < 0) return to_python(ev, CALL, notify_fd, call);
    w.cookie = cookie_of(fd);
    drop_connecting(nf, w.cookie);
    struct known *k = known(nf, w.cookie);
    size_t bytes = k && k->family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    uint64_t where = 0;
    if (k && k->phase == FRESH && call->args[2] >= bytes && call->args[2] <= sizeof name
        && !read_memory(call->pid, call->args[1], &name, bytes) && name.ss_family == k->family
        && !decode(&name, &w.shown_ip, &w.shown_port)) {
        w.family = k->family;
        where = route(nf, &w, ev);
    }
    if (where) return start(nf, notify_fd, call, &w, fd, where, ev);
    close(fd);
    return to_python(ev, CALL, notify_fd, call);
}
static int connected(struct netfast *nf, uint32_t i, struct event *ev) {
    struct waiter w = nf->waiting[i];
    struct notification call = nf->journal[i + 1];
    int error = connect(w.fd, (struct sockaddr *)&w.target, w.target_bytes) ? errno : 0;
    if (error == EALREADY) return NOTHING;
    epoll_ctl(nf->epoll, EPOLL_CTL_DEL, w.fd, NULL);
    nf->waiting[i].fd = -1;
    /* The call being handled, should we die now. */
    nf->journal[0] = call;
    end_waiter(nf, i);
    return ended(nf, w.notify_fd, &call, &w, w.fd, error == EISCONN ? 0 : error, ev);
}

/* accept(). */
static int flags_of(const struct notification *call) {
#ifdef SYS_accept
    if (call->nr == SYS_accept) return 0;
#endif
    return (int)call->args[3];
}
/* A connection whose announcement is known goes to the program; -1: Python has to deal with it. */
static int handed_over(struct netfast *nf, int notify_fd, const struct notification *call, const struct listener *l, int made,
                       const struct expected *what) {
    uint64_t cookie = cookie_of(made);
    struct sockaddr_storage name;
    socklen_t bytes = sizeof name;
    /* Reset by its client: what it sent may be a stranger's, who had this port before. */
    if (getpeername(made, (struct sockaddr *)&name, &bytes)) return -1;
    int from_pod = !nf->ingress && what->ip == nf->ip && what->source_ip >> 24 != 127;
    if (!cookie || what->port != l->port || !(what->inner ? what->inner == 1 : from_pod)) return -1;
    if (call->args[1]
        && told(call->pid, call->args[1], call->args[2], l->family, what->source_ip, what->source_port))
        return -1;
    if (given(notify_fd, call->id, made, flags_of(call) & SOCK_CLOEXEC)) return -1;
    *place_of(nf, cookie) =
        (struct known){cookie, what->ip, what->source_ip, what->port, what->source_port, NAMED, l->family};
    count(nf, C_ACCEPTED);
    recorded(nf, (struct record){.cookie = cookie, .ip = what->ip, .peer_ip = what->source_ip, .port = what->port,
                                 .peer_port = what->source_port, .kind = MADE_ACCEPTED, .family = l->family});
    close(made);
    return 0;
}
static int for_python(int notify_fd, const struct notification *call, const struct listener *l, int fd, int made,
                      struct event *ev) {
    ev->made = made, ev->fd = fd, ev->cookie = l->cookie, ev->family = l->family;
    return to_python(ev, ACCEPTED, notify_fd, call);
}
static int held(struct netfast *nf, int notify_fd, const struct notification *call, const struct listener *l, int fd,
                int made, uint64_t key) {
    uint32_t i = new_waiter(nf, notify_fd, call);
    if (i == NONE) return -1;
    struct waiter *w = &nf->waiting[i];
    w->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0), w->accepts = 1, w->made = made, w->key = key, w->cookie = l->cookie;
    clock_gettime(CLOCK_MONOTONIC, &w->since);
    nf->state.held++;
    listen_for_datagrams(nf, 1);
    return 0;
}
/* Take a connection that is there; -1: there is none. `fd`, a copy of the listener, stays the caller's. */
static int deliver(struct netfast *nf, int notify_fd, const struct notification *call, const struct listener *l, int fd,
                   struct event *ev) {
    struct sockaddr_storage name;
    socklen_t bytes = sizeof name;
    struct pollfd ready = {fd, POLLIN, 0};
    struct expected what;
    uint32_t ip;
    uint16_t port;
    if (poll(&ready, 1, 0) != 1) return -1;
    int made = accept4(fd, (struct sockaddr *)&name, &bytes, (flags_of(call) & SOCK_NONBLOCK) | SOCK_CLOEXEC);
    count(nf, C_ACCEPT);
    if (made < 0) {
        answered(notify_fd, call->id, errno);
        return NOTHING;
    }
    if (decode(&name, &ip, &port)) return for_python(notify_fd, call, l, fcntl(fd, F_DUPFD_CLOEXEC, 0), made, ev);
    uint64_t key = key_of(ip, port, l->port);
    int sure = claim(nf, key, &what);
    if (!sure) {
        if (!nf->pending) nf->pending = receive_until(nf, key);
        sure = claim(nf, key, &what);
    }
    if (sure && !handed_over(nf, notify_fd, call, l, made, &what)) return NOTHING;
    if (sure) expect(nf, what);
    else if (!held(nf, notify_fd, call, l, fd, made, key)) return NOTHING;
    return for_python(notify_fd, call, l, fcntl(fd, F_DUPFD_CLOEXEC, 0), made, ev);
}
/* Connections that wait for their announcement: one has come, or has not come in time. */
static int settled(struct netfast *nf, struct event *ev) {
    int look = (int)nf->look;
    nf->look = 0;
    for (uint32_t i = 0; i < nf->waiters; i++) {
        struct waiter w = nf->waiting[i];
        struct expected what;
        if (!w.used || w.made < 0) continue;
        int sure = look && claim(nf, w.key, &what);
        if (!sure && since_ms(&w.since) < HOLD_MS) continue;
        struct notification call = nf->journal[0] = nf->journal[i + 1];
        struct listener none = {.cookie = w.cookie}, *l = listener(nf, w.cookie);
        int done = sure && l && !handed_over(nf, w.notify_fd, &call, l, w.made, &what);
        if (sure && !done) expect(nf, what);
        if (!done) nf->waiting[i].fd = -1, nf->look = 1;
        end_waiter(nf, i);
        if (!done) return for_python(w.notify_fd, &call, l ? l : &none, w.fd, w.made, ev);
    }
    return NOTHING;
}
static int serve_accept(struct netfast *nf, int notify_fd, const struct notification *call, struct event *ev) {
    int fd = copied(nf, call->pid, call->args[0]), result = -1;
    struct listener *l = fd < 0 ? NULL : listener(nf, cookie_of(fd));
    if (!l || l->busy || nf->ingress || flags_of(call) & ~(SOCK_NONBLOCK | SOCK_CLOEXEC)) {
        if (fd >= 0) close(fd);
        return to_python(ev, CALL, notify_fd, call);
    }
    if (l->first == NONE) result = deliver(nf, notify_fd, call, l, fd, ev);
    if (result >= 0) {
        close(fd);
        return result;
    }
    if (fcntl(fd, F_GETFL) & O_NONBLOCK) {
        count(nf, C_ACCEPT);
        answered(notify_fd, call->id, EAGAIN);
        close(fd);
        return NOTHING;
    }
    struct timeval patience = {0, 0};
    socklen_t bytes = sizeof patience;
    getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, &bytes);
    uint32_t i = patience.tv_sec || patience.tv_usec ? NONE : new_waiter(nf, notify_fd, call);
    if (i == NONE || (l->copy < 0 && hold_of(nf, ACCEPTED, fd, (uint32_t)(l - nf->listeners)))) {
        if (i != NONE) end_waiter(nf, i);
        close(fd);
        return to_python(ev, CALL, notify_fd, call);
    }
    if (l->copy < 0) l->copy = fd;
    else close(fd);
    nf->waiting[i].accepts = 1, nf->waiting[i].cookie = l->cookie;
    *(l->first == NONE ? &l->first : &nf->waiting[l->last].next) = i;
    l->last = i;
    count(nf, C_ACCEPT);
    return NOTHING;
}
static int arrived(struct netfast *nf, struct listener *l, struct event *ev) {
    while (l->first != NONE && !valid(nf->waiting[l->first].notify_fd, nf->journal[l->first + 1].id)) pop_waiter(nf, l);
    int result = NOTHING;
    if (l->first != NONE) {
        struct notification call = nf->journal[0] = nf->journal[l->first + 1];
        result = deliver(nf, nf->waiting[l->first].notify_fd, &call, l, l->copy, ev);
        if (result < 0) return NOTHING;
        nf->state.counts[C_ACCEPT]--;
        pop_waiter(nf, l);
    }
    rest(nf, l);
    return result;
}

/* getsockname(), getpeername(). */
static int serve_name(struct netfast *nf, int notify_fd, const struct notification *call, int peer, struct event *ev) {
    int fd = copied(nf, call->pid, call->args[0]);
    struct known *k = fd < 0 ? NULL : known(nf, cookie_of(fd));
    struct sockaddr_storage name;
    socklen_t bytes = sizeof name;
    int sure = k && k->phase == NAMED && (!peer || !getpeername(fd, (struct sockaddr *)&name, &bytes));
    if (fd >= 0) close(fd);
    if (!sure || told(call->pid, call->args[1], call->args[2], k->family, peer ? k->peer_ip : k->ip, peer ? k->peer_port : k->port))
        return to_python(ev, CALL, notify_fd, call);
    answered(notify_fd, call->id, 0);
    count(nf, peer ? C_GETPEERNAME : C_GETSOCKNAME);
    return NOTHING;
}

static int serve(struct netfast *nf, int notify_fd, struct event *ev) {
    struct notification call;
    memset(&call, 0, sizeof call);
    if (ioctl(notify_fd, NOTIF_RECV, &call)) return NOTHING;
    nf->journal[0] = call;
    ev->turn = -1;
    if (call.arch != NATIVE_ARCH) return to_python(ev, CALL, notify_fd, &call);
    switch (call.nr) {
    case SYS_socket: return serve_socket(nf, notify_fd, &call, ev);
    case SYS_connect: return serve_connect(nf, notify_fd, &call, ev);
#ifdef SYS_accept
    case SYS_accept:
#endif
    case SYS_accept4: return serve_accept(nf, notify_fd, &call, ev);
    case SYS_getsockname: return serve_name(nf, notify_fd, &call, 0, ev);
    case SYS_getpeername: return serve_name(nf, notify_fd, &call, 1, ev);
    default: return to_python(ev, CALL, notify_fd, &call);
    }
}

/* What has happened at the descriptors that are watched. */
static int happened(struct netfast *nf, const struct epoll_event *event, struct event *ev) {
    int fd = (int)(uint32_t)event->data.u64;
    uint32_t value = (uint32_t)(event->data.u64 >> 32) & 0xffffff;
    switch (event->data.u64 >> 56) {
    case CALL:
        if (event->events & EPOLLIN) return serve(nf, fd, ev);
        epoll_ctl(nf->epoll, EPOLL_CTL_DEL, fd, NULL);
        ev->notify_fd = fd;
        return ev->kind = GONE;
    case DATAGRAM:
        if (!nf->pending) nf->pending = netfast_receive(nf);
        if (!nf->pending && !nf->state.held && !nf->holding && nf->sleeps) listen_for_datagrams(nf, 0);
        return NOTHING;
    /* Others of the same batch may have ended these already, and their descriptors may be somebody else's. */
    case ACCEPTED: return nf->listeners[value].copy == fd ? arrived(nf, &nf->listeners[value], ev) : NOTHING;
    case REFUSED: return nf->waiting[value].used && nf->waiting[value].fd == fd ? connected(nf, value, ev) : NOTHING;
    default: return NOTHING;
    }
}
#define LINGER_MS 20
/* Serve until Python is needed: for an event, for descriptors of its own, for records that have waited, or for its timers. */
int netfast_run(struct netfast *nf, struct event *ev, int timeout_ms) {
    struct epoll_event events[16];
    struct timespec began;
    nf->sleeps = timeout_ms != 0;
    if (!nf->sleeps) listen_for_datagrams(nf, 1);
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (;;) {
        int wait_ms = timeout_ms, outer = 0;
        if (nf->state.held && settled(nf, ev)) return ev->kind;
        if (nf->pending) {
            ev->size = nf->pending;
            nf->pending = 0;
            uint64_t sender = netfast_sender(nf);
            ev->ip = (uint32_t)(sender >> 16), ev->port = sender & 0xffff;
            return ev->kind = DATAGRAM;
        }
        if (wait_ms > 0) {
            int64_t passed_ms = since_ms(&began);
            wait_ms = passed_ms >= timeout_ms ? 0 : (int)(timeout_ms - passed_ms);
        }
        if (nf->state.dirty && wait_ms) {
            int64_t left_ms = LINGER_MS - since_ms(&nf->dirty_since);
            if (left_ms <= 0) return ev->kind = NOTHING;
            if (wait_ms < 0 || wait_ms > left_ms) wait_ms = (int)left_ms;
        }
        if (nf->state.held && wait_ms) wait_ms = wait_ms > 0 && wait_ms < HOLD_MS ? wait_ms : HOLD_MS;
        int deaf = nf->deaf && wait_ms;
        int ready = epoll_wait(nf->epoll, events, 16, deaf ? DEAF_MS : wait_ms);
        if (deaf && (!ready || since_ms(&nf->deaf_since) >= DEAF_MS)) {
            listen_for_datagrams(nf, 1);
            if (!ready) continue;
        }
        if (ready < 0 || (!ready && !nf->state.held) || (!ready && !wait_ms)) return ev->kind = NOTHING;
        for (int i = 0; i < ready; i++) {
            if (events[i].data.u64 >> 56 == GONE) outer = 1;
            else if (happened(nf, &events[i], ev)) return ev->kind;
        }
        if (nf->pending || (nf->state.held && nf->look)) continue;
        if (outer || nf->state.recorded >= ENOUGH_RECORDS || !timeout_ms) return ev->kind = NOTHING;
    }
}

/* What Python tells. */
int netfast_abi(void) { return ABI << 16 | (int)sizeof(struct event) << 8 | (int)sizeof(struct record); }
int netfast_watch(struct netfast *nf, int notify_fd) { return hold_of(nf, CALL, notify_fd, 0); }
int netfast_outer(struct netfast *nf, int fd) { return hold_of(nf, GONE, fd, 0); }
int netfast_fd(const struct netfast *nf) { return nf->epoll; }
struct state *netfast_state(struct netfast *nf) { return &nf->state; }
void netfast_policy(struct netfast *nf, int ingress, int egress) { nf->ingress = ingress, nf->egress = egress; }
void netfast_holding(struct netfast *nf, int holding) { nf->holding = holding; }
int netfast_peer(struct netfast *nf, uint32_t ip, uint32_t port, uint32_t host_ip, uint32_t overlay_port, uint32_t host_port) {
    uint64_t key = TAG_LISTENER | (uint64_t)ip << 16 | port;
    if (!host_port) return (int)!take(&nf->map, key);
    return put(&nf->map, key, (uint64_t)host_ip << 32 | overlay_port << 16 | host_port);
}
int netfast_service(struct netfast *nf, uint32_t ip, uint32_t port, uint32_t next, uint32_t backends, const uint32_t *to) {
    uint64_t key = TAG_SERVICE | (uint64_t)ip << 16 | port;
    free((void *)(uintptr_t)take(&nf->map, key));
    if (backends == NONE) return 0;
    struct service *made = malloc(sizeof *made + backends * sizeof made->to[0]);
    if (!made) return -1;
    made->next = next, made->count = backends;
    memcpy(made->to, to, backends * sizeof made->to[0]);
    if (!put(&nf->map, key, (uint64_t)(uintptr_t)made)) return 0;
    free(made);
    return -1;
}
int netfast_listener(struct netfast *nf, uint64_t cookie, int family, uint32_t port) {
    struct listener *l = listener(nf, cookie);
    if (!port && l) {
        while (l->first != NONE) {
            answered(nf->waiting[l->first].notify_fd, nf->journal[l->first + 1].id, EINVAL);
            pop_waiter(nf, l);
        }
        rest(nf, l);
        l->cookie = 0;
    }
    if (!port || l) return 0;
    for (int i = 0; i < LISTENERS; i++) {
        if (nf->listeners[i].cookie) continue;
        nf->listeners[i] = (struct listener){cookie, -1, NONE, NONE, (uint16_t)port, (uint8_t)family, 0};
        return 0;
    }
    return -1;
}
void netfast_busy(struct netfast *nf, uint64_t cookie, int busy) {
    struct listener *l = listener(nf, cookie);
    if (l) l->busy = (uint8_t)busy;
}
void netfast_free(struct netfast *nf) {
    /* Calls that wait stay in the journal: the next netd answers them. */
    for (uint32_t i = 0; i < nf->waiters; i++)
        if (nf->waiting[i].used) {
            if (nf->waiting[i].fd >= 0) close(nf->waiting[i].fd);
            if (nf->waiting[i].made >= 0) close(nf->waiting[i].made);
        }
    for (int i = 0; i < LISTENERS; i++)
        if (nf->listeners[i].cookie && nf->listeners[i].copy >= 0) close(nf->listeners[i].copy);
    for (int i = 0; i < PIDFDS; i++)
        if (nf->pidfds[i].fd >= 0) close(nf->pidfds[i].fd);
    for (size_t i = 0; nf->map.slots && i <= nf->map.mask; i++)
        if (nf->map.slots[i].key & TAG_SERVICE) free((void *)(uintptr_t)nf->map.slots[i].value);
    if (nf->epoll >= 0) close(nf->epoll);
    free(nf->map.slots);
    free(nf->expected);
    free(nf->known);
    free(nf);
}
void netfast_ranges(struct netfast *nf, uint32_t pods, uint32_t pods_mask, uint32_t services, uint32_t services_mask) {
    nf->pods.base = pods, nf->pods.mask = pods_mask, nf->services.base = services, nf->services.mask = services_mask;
}
struct netfast *netfast_new(uint32_t ip, uint32_t host_ip, const uint8_t *key, int key_bytes, int udp, void *journal,
                            uint32_t journal_slots, uint8_t *room, int room_bytes) {
    struct netfast *nf = key_bytes > 0 && key_bytes <= 64 && journal_slots > 1 ? calloc(1, sizeof *nf) : NULL;
    if (!nf) return NULL;
    nf->ip = ip, nf->host_ip = host_ip, nf->udp = udp, nf->journal = journal, nf->room = room, nf->room_bytes = room_bytes;
    nf->waiters = journal_slots - 1 < MAX_WAITERS ? journal_slots - 1 : MAX_WAITERS;
    nf->by_thread = 1;
    nf->oldest = nf->newest = nf->unused = NONE;
    memset(nf->buckets, 0xff, sizeof nf->buckets);
    for (int i = 0; i < PIDFDS; i++) nf->pidfds[i].fd = -1;
    for (int i = 0; i < LISTENERS; i++) nf->listeners[i].copy = -1;
    keyed(nf->hash, key, key_bytes);
    nf->expected = calloc(EXPECTED, sizeof *nf->expected);
    nf->known = calloc(KNOWN, sizeof *nf->known);
    nf->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (!nf->expected || !nf->known || nf->epoll < 0 || grow(&nf->map, 64) || hold_of(nf, DATAGRAM, udp, 0)) {
        netfast_free(nf);
        return NULL;
    }
    return nf;
}
