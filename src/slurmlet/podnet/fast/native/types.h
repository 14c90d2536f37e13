/* What netfast.c works on: seccomp's notifications, what is told to Python, what is remembered. */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define ABI 3

/* seccomp's notifications, spelled out here: headers of old distributions lack the newer half. */
struct notification {
    uint64_t id;
    uint32_t pid, flags;
    int32_t nr;
    uint32_t arch;
    uint64_t instruction, args[6];
};
struct answer { uint64_t id; int64_t value; int32_t error; uint32_t flags; };
struct addfd { uint64_t id; uint32_t flags, srcfd, newfd, newfd_flags; };
/* AUDIT_ARCH_…: calls of other machines' programs have other numbers. */
#if defined __x86_64__
#define NATIVE_ARCH 0xC000003Eu
#elif defined __aarch64__
#define NATIVE_ARCH 0xC00000B7u
#else
#define NATIVE_ARCH 0u
#endif
#define NOTIF_RECV _IOWR('!', 0, struct notification)
#define NOTIF_SEND _IOWR('!', 1, struct answer)
#define NOTIF_ID_VALID _IOW('!', 2, uint64_t)
#define NOTIF_ADDFD _IOW('!', 3, struct addfd)
#define ADDFD_SEND 2
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif
#define PIDFD_THREAD O_EXCL
#ifndef IP_BIND_ADDRESS_NO_PORT
#define IP_BIND_ADDRESS_NO_PORT 24
#endif
#ifndef SO_COOKIE
#define SO_COOKIE 57
#endif

/* What run() returns; native/library.py knows the same numbers and layouts. */
enum { NOTHING, CALL, DATAGRAM, ACCEPTED, REFUSED, GONE };
struct event {
    struct notification call;
    uint64_t cookie;
    int32_t kind, notify_fd, fd, made;
    uint32_t ip, port;                 /* a datagram's sender; a Service whose turn it is */
    int32_t size, turn;                /* bytes of a datagram; which backend, or -1 */
    uint32_t shown_ip, real_ip;
    uint16_t shown_port, real_port, source_port, family;
};
enum { MADE_CONNECTING = 1, MADE_CONNECTED, MADE_ACCEPTED, FAILED };
struct record {
    uint64_t cookie;
    uint32_t ip, peer_ip, real_ip;
    uint16_t port, peer_port, real_port;
    uint8_t kind, family, undelivered, announced;
};
enum { C_SOCKET, C_CONNECT, C_ACCEPT, C_GETSOCKNAME, C_GETPEERNAME, C_POD, C_HOST, C_FAILED, C_ACCEPTED, COUNTS };
#define MAX_RECORDS 512
#define ENOUGH_RECORDS 256

struct state {                         /* read by Python without a call */
    uint64_t counts[COUNTS];
    uint32_t recorded, waiting;
    int32_t dirty;
    uint32_t held;
    struct record records[MAX_RECORDS];
};

/* A cache of sockets, by cookie: a miss is Python's. */
enum { FRESH = 1, NAMED };
struct known { uint64_t cookie; uint32_t ip, peer_ip; uint16_t port, peer_port; uint8_t phase, family; };
#define KNOWN 8192
struct pidfd { uint32_t pid; int fd; };
#define PIDFDS 256

/* `inner`: not announced by anybody, but a connection of the pod to itself; 2: to ::1, which is Python's. */
struct expected { uint64_t key; uint32_t source_ip, ip; uint16_t source_port, port; uint32_t came_s, next, older, newer, inner; };
#define EXPECTED 16384
#define EXPECTED_S 10                  /* as overlay.py: later the source port may be a stranger's */
#define NONE 0xFFFFFFFFu

/* Without backends: nobody serves it, or somebody whom Python chooses. */
struct service { uint32_t next, count; struct { uint32_t ip, port; } to[]; };
struct slot { uint64_t key, value; };
struct map { struct slot *slots; size_t mask, used; };
#define TAG_LISTENER (1ull << 48)
#define TAG_SERVICE (2ull << 48)

#define LISTENERS 64
struct listener { uint64_t cookie; int32_t copy; uint32_t first, last; uint16_t port; uint8_t family, busy; };
/* A call that waits: for a connection (at a listener) or for its connect(). Its notification is in the journal's slot. */
struct waiter {
    int32_t notify_fd, fd;
    uint32_t next;
    uint64_t cookie;
    struct sockaddr_storage target;
    socklen_t target_bytes;
    uint32_t shown_ip, real_ip;
    uint16_t shown_port, real_port, source_port;
    uint8_t used, accepts, family, announced;
    /* A connection that was taken for this call before its announcement came: since when, and whose it is. */
    int32_t made;
    uint64_t key;
    struct timespec since;
};
#define MAX_WAITERS 64
#define HOLD_MS 5                      /* then Python asks for it */
#define HOSTS 256

struct netfast {
    struct state state;
    uint32_t ip, host_ip;
    struct { uint32_t base, mask; } pods, services;
    int epoll, udp, outer, by_thread, egress, ingress, holding;
    uint64_t hash[8];                  /* blake2b after the key's block */
    struct notification *journal;      /* [0]: the call being handled; [1…]: those that wait */
    uint32_t waiters, look;
    uint8_t *room;
    int room_bytes, pending;
    struct sockaddr_in sender;
    struct timespec dirty_since;
    /* Whether the overlay's socket wakes us up; since when not. */
    int deaf, sleeps;
    struct timespec deaf_since;
    struct map map;
    struct listener listeners[LISTENERS];
    struct waiter waiting[MAX_WAITERS];
    struct { uint32_t host_ip; int elsewhere; } hosts[HOSTS];
    struct pidfd pidfds[PIDFDS];
    uint32_t buckets[EXPECTED], oldest, newest, unused, fresh;
    struct expected *expected;
    struct known *known;
};
