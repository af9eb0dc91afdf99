/* SPDX-License-Identifier: Apache-2.0 */
/* talk PATH: connect to a UNIX socket; copy stdin to it and what it says to stdout, until it is closed. */
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* Copy what is there from descriptor `from` to `to`; false at the end. */
static bool copy(int from, int to) {
    char text[4096];
    ssize_t got = read(from, text, sizeof text);
    return got > 0 && write(to, text, (size_t)got) == got;
}

int main(int argc, char **argv) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int s = socket(AF_UNIX, SOCK_STREAM, 0);
    if (argc != 2 || s < 0 || strlen(argv[1]) >= sizeof address.sun_path) return 2;
    strcpy(address.sun_path, argv[1]);
    if (connect(s, (struct sockaddr *)&address, sizeof address)) {
        perror(argv[1]);
        return 1;
    }
    struct pollfd ends[2] = {{.fd = s, .events = POLLIN}, {.fd = 0, .events = POLLIN}};
    while (poll(ends, 2, -1) > 0) {
        if (ends[0].revents && !copy(s, 1)) break;
        if (ends[1].revents && !copy(0, s)) {
            shutdown(s, SHUT_WR);
            ends[1].fd = -1;
        }
    }
    return 0;
}
