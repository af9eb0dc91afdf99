/* SPDX-License-Identifier: Apache-2.0 */
/* What becomes of a program whose mapped bundle cannot be read any more. */
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "../include/mxdraft.h"

static char last_words[1024];
static volatile sig_atomic_t last_code;

/* In the thread that read the page; only what signal-safety(7) allows. Its own stack is not part of any bundle. */
static void on_bus_error(int signal_number, siginfo_t *info, void *context) {
    (void)context;
    if (info->si_code == BUS_ADRERR) {
        if (write(STDERR_FILENO, last_words, strlen(last_words)) < 0) _exit(last_code);
        _exit(last_code);
    }
    signal(signal_number, SIG_DFL); /* another fault: the instruction runs again, and ends the process */
}

void mxd_exit_on_bus_error(const char *message, int code) {
    size_t length = strnlen(message, sizeof last_words - 1);
    memcpy(last_words, message, length);
    last_words[length] = '\0';
    last_code = code;
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGBUS, &action, NULL);
}
