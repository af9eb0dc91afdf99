/* SPDX-License-Identifier: Apache-2.0 */
/* mxdraft on the device: each process runs one command (cli.h is the map). */
#include "cli.h"

int main(int argc, char **argv) {
    settings s;
    session run = {0};
    int code;
    terminal_init();
    command_function *command = parse_arguments(argc, argv, &s, &code);
    if (command) code = command(&s, &run);
    session_close(&run);
    return code;
}
