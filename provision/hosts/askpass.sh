#!/bin/sh
# SSH_ASKPASS of ssh_with_password.sh. $1: ssh's question. The file has a line USER@HOST before each password;
# every other question, such as a jump host's or one for a second factor, gets no answer.
while IFS= read -r who && IFS= read -r word; do
    if [ "$1" = "$who's password: " ]; then
        printf '%s\n' "$word" # a part of the shell: no process has it as an argument
        exit 0
    fi
done <"$OEPROV_PASSWORDS"
exit 1
