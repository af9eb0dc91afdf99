/* mxdraft on the device: each process runs one command (cli.h is the map). */
#include "cli.h"

int main(int argc, char **argv) {
    settings s;
    int code;
    terminal_init();
    command_function *run = parse_arguments(argc, argv, &s, &code);
    return run ? run(&s) : code;
}
