"""A browser in which a person signs in at the cluster's identity provider: `python sign_in.py NAME URL`."""

import sys
from http.cookiejar import CookieJar, DefaultCookiePolicy
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener


def sign_in(name: str, url: str) -> None:
    """Open the page, which is the provider's form, and send it; redirections lead to whoever asked."""
    # Flyte's cookies are for TLS, which the cluster of the tests does not have.
    jar = CookieJar(DefaultCookiePolicy(secure_protocols=("http", "https")))
    opener = build_opener(HTTPCookieProcessor(jar))
    with opener.open(url, timeout=60) as page:
        form = page.url
    opener.open(form, urlencode({"sub": name}).encode(), timeout=60).close()


if __name__ == "__main__":
    sign_in(*sys.argv[1:])
