#!/bin/sh
# A Chromium for tests/test_browser.py: the one that is there, Debian's for root, or the one that Playwright brings.
#     sh tests/install_browser.sh VENV
set -eu
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" > /dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core > /dev/null
else
    "$1/bin/playwright" install chromium
fi
