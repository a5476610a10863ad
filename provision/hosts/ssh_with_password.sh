#!/bin/sh
# Runs ssh so that it logs in with a password only, which askpass.sh gives, in one try. The first value of an
# option counts, so that these are not overruled.
SSH_ASKPASS=${0%/*}/askpass.sh SSH_ASKPASS_REQUIRE=force
export SSH_ASKPASS SSH_ASKPASS_REQUIRE
exec ssh -oBatchMode=no -oPasswordAuthentication=yes -oPreferredAuthentications=password -oNumberOfPasswordPrompts=1 "$@"
