/*
 * The bytes of an answer, from a socket to their place. In Python, each of the calls below gives up
 * the interpreter lock and waits for it again, in up to 64 threads: most of their time went there.
 */

#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "receive.h"

enum { PIPE_BYTES = 1 << 20, COPY_BYTES = 16 << 10 };

/* Waits end when so many bytes are there, instead of at each packet; on a slow line after a while. */
enum { WAKE_BYTES = 512 << 10, WAKE_MS = 50 };

/* Why fewer bytes came: the answer ended, or nothing did; the deadline has passed; silence; an error
 * of the socket; one of the file; the kernel cannot splice from this socket or to this file. */
enum end { ENDED, LATE, SILENT, BROKEN, NOT_STORED, NO_SPLICE };

struct patience {
    int64_t deadline_ms, silence_ms;
};

/* The kernel allocates for one thread of a file at a time, and others would spin. */
static pthread_mutex_t storing = PTHREAD_MUTEX_INITIALIZER;

static int64_t fail(int32_t *end, enum end why, int error)
{
    end[0] = why;
    end[1] = error;
    return -1;
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void wake_at(int sock, int64_t bytes)
{
    int count = bytes < WAKE_BYTES ? (int)bytes : WAKE_BYTES;
    setsockopt(sock, SOL_SOCKET, SO_RCVLOWAT, &count, sizeof count);
}

/* Wait for the next of `left` bytes, or the end, of what the socket receives. Whether it is in time. */
static int64_t wait_for(int sock, int64_t left, const struct patience *patience, int32_t *end)
{
    struct pollfd arrival = {.fd = sock, .events = POLLIN};
    int64_t time_left = patience->deadline_ms - now_ms(), silence = patience->silence_ms;
    enum end late = silence < time_left ? SILENT : LATE;
    int64_t wait = silence < time_left ? silence : time_left;
    wait = wait < 0 ? 0 : wait > INT32_MAX ? INT32_MAX : wait;
    wake_at(sock, left);
    int count = poll(&arrival, 1, wait < WAKE_MS ? (int)wait : WAKE_MS);
    wake_at(sock, 1);
    if (!count)
        count = poll(&arrival, 1, wait < WAKE_MS ? 0 : (int)wait - WAKE_MS);
    if (count > 0 || (count < 0 && errno == EINTR))
        return 0;
    return count ? fail(end, BROKEN, errno) : fail(end, late, 0);
}

static int cannot_splice(int error)
{
    return error == EINVAL || error == ENOSYS || error == EPERM;
}

/* Move up to `count` bytes from the socket into the pipe; 0: there are no more. */
static int64_t arrive(int sock, int pipe, int64_t count, const struct patience *patience,
                      int32_t *end)
{
    for (;;) {
        if (wait_for(sock, count, patience, end) < 0)
            return -1;
        ssize_t moved = splice(sock, NULL, pipe, NULL, (size_t)count, SPLICE_F_NONBLOCK);
        if (moved >= 0)
            return moved;
        if (errno != EAGAIN && errno != EINTR) /* else it was woken for nothing */
            return fail(end, cannot_splice(errno) ? NO_SPLICE : BROKEN, errno);
    }
}

/* Copy what is left in the pipe, since the kernel cannot move it. */
static int64_t copy(int pipe, int file, int64_t offset, int64_t count, int32_t *end)
{
    uint8_t buffer[COPY_BYTES];
    int64_t done = 0;
    while (done < count) {
        ssize_t length = read(pipe, buffer, sizeof buffer);
        if (length <= 0)
            return fail(end, BROKEN, errno);
        for (ssize_t at = 0; at < length;) {
            ssize_t put = pwrite(file, buffer + at, (size_t)(length - at), offset + done);
            if (put <= 0)
                return fail(end, NOT_STORED, errno);
            at += put;
            done += put;
        }
    }
    fail(end, NO_SPLICE, 0);
    return done;
}

/* Move `count` bytes from the pipe into the file. */
static int64_t store(int pipe, int file, int64_t offset, int64_t count, int32_t *end)
{
    int64_t done = 0;
    while (done < count) {
        loff_t at = offset + done;
        pthread_mutex_lock(&storing);
        ssize_t moved = splice(pipe, NULL, file, &at, (size_t)(count - done), 0);
        int error = errno;
        pthread_mutex_unlock(&storing);
        if (moved > 0)
            done += moved;
        else if (moved < 0 && cannot_splice(error))
            return copy(pipe, file, offset + done, count - done, end) < 0 ? -1 : count;
        else if (moved == 0 || error != EINTR)
            return fail(end, NOT_STORED, moved ? error : EIO);
    }
    return done;
}

int64_t receive_into_file(int32_t sock, int32_t file, int64_t offset, int64_t length,
                          int64_t deadline_ms, int64_t silence_ms, int32_t *end)
{
    const struct patience patience = {deadline_ms, silence_ms};
    int pipe[2];
    int64_t done = 0;
    end[0] = ENDED;
    end[1] = 0;
    if (pipe2(pipe, O_CLOEXEC | O_NONBLOCK)) {
        fail(end, BROKEN, errno);
        return 0;
    }
    /* A user's pipes share a limit. With a small one this takes more calls. */
    fcntl(pipe[1], F_SETPIPE_SZ, PIPE_BYTES);
    while (done < length && end[0] == ENDED) {
        int64_t most = length - done < PIPE_BYTES ? length - done : PIPE_BYTES;
        int64_t count = arrive(sock, pipe[1], most, &patience, end);
        if (count <= 0)
            break;
        count = store(pipe[0], file, offset + done, count, end);
        if (count < 0)
            break;
        done += count;
    }
    close(pipe[0]);
    close(pipe[1]);
    return done;
}

int64_t receive_into_memory(int32_t sock, uint8_t *into, int64_t length, int64_t deadline_ms,
                            int64_t silence_ms, int32_t *end)
{
    const struct patience patience = {deadline_ms, silence_ms};
    int64_t done = 0;
    end[0] = ENDED;
    end[1] = 0;
    while (done < length) {
        ssize_t count = recv(sock, into + done, (size_t)(length - done), MSG_DONTWAIT);
        if (count == 0)
            break;
        if (count > 0)
            done += count;
        else if (errno != EAGAIN && errno != EINTR) {
            fail(end, BROKEN, errno);
            break;
        } else if (wait_for(sock, length - done, &patience, end) < 0)
            break;
    }
    return done;
}

uint32_t receive_source_crc(void)
{
    return SOURCE_CRC;
}
