"""A reader of PromQL, for the expressions that are shipped: it raises SyntaxError for what Prometheus would refuse.

It knows selectors with matchers, ranges and offsets, calls, aggregations, and binary operators with their precedence,
`bool`, `on` and `ignoring`. Subqueries, `@` and grouping modifiers it refuses, too.
"""

import re
from dataclasses import dataclass, field

AGGREGATIONS = {"sum", "min", "max", "avg", "count", "topk", "bottomk", "quantile"}
# How many arguments a function takes, and which of them are ranges.
FUNCTIONS = {
    "avg_over_time": (1, {0}), "max_over_time": (1, {0}), "quantile_over_time": (2, {1}), "changes": (1, {0}),
    "rate": (1, {0}), "increase": (1, {0}), "histogram_quantile": (2, set()), "clamp_max": (2, set()),
    "time": (0, set()),
}  # fmt: skip
PRECEDENCE = [{"or"}, {"and", "unless"}, {"==", "!=", "<=", "<", ">=", ">"}, {"+", "-"}, {"*", "/", "%"}, {"^"}]
_TOKEN = re.compile(
    r"""\s*(?:(?P<duration>[0-9]+(?:ms|[smhdwy])\b)|(?P<number>[0-9]+(?:\.[0-9]+)?)|(?P<text>"[^"\\]*")"""
    r"""|(?P<variable>\$__rate_interval)|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"""
    r"""|(?P<sign>=~|!~|==|!=|<=|>=|[-+*/%^<>=(){}\[\],]))"""
)


@dataclass
class Selector:
    """A metric that is read, and the labels that it is chosen by."""

    metric: str
    labels: dict[str, str] = field(default_factory=dict)


def read(expression):
    """The selectors of `expression`, and the labels that it aggregates by."""
    reader = _Reader(expression)
    kind = reader.binary(0)
    if reader.kind != "end":
        raise reader.wrong("an operator or the end")
    if kind == "range":
        raise SyntaxError(f"{expression}: a range is no value by itself")
    return reader.selectors, reader.grouped


class _Reader:
    def __init__(self, expression):
        self.expression, self.position = expression, 0
        self.selectors, self.grouped = [], set()
        self.advance()

    def advance(self):
        if not self.expression[self.position :].strip():
            self.kind, self.token = "end", ""
            return
        match = _TOKEN.match(self.expression, self.position)
        if match is None:
            raise SyntaxError(f"{self.expression}: cannot read {self.expression[self.position :]!r}")
        self.kind, self.token, self.position = match.lastgroup, match[match.lastgroup], match.end()

    def wrong(self, wanted):
        return SyntaxError(f"{self.expression}: {self.token or 'the end'!r} where {wanted} belongs")

    def take(self, *tokens):
        if self.kind == "text" or self.token not in tokens:
            return False
        self.advance()
        return True

    def demand(self, token):
        if not self.take(token):
            raise self.wrong(repr(token))

    def of(self, *kinds):
        if self.kind not in kinds:
            raise self.wrong(" or ".join(kinds))
        token = self.token
        self.advance()
        return token

    def binary(self, level):
        if level == len(PRECEDENCE):
            return self.unary()
        left = self.binary(level + 1)
        while self.kind in ("name", "sign") and self.token in PRECEDENCE[level]:
            operator = self.of("name", "sign")
            if operator in PRECEDENCE[2]:
                self.take("bool")
            if self.take("on", "ignoring"):
                self.labels()
            right = self.binary(level + 1)
            if "range" in (left, right) or (level < 2 and "scalar" in (left, right)):
                raise SyntaxError(f"{self.expression}: {operator} of a {left} and a {right}")
            left = "scalar" if left == right == "scalar" else "vector"
        return left

    def unary(self):
        while self.take("-", "+"):
            pass
        if self.take("("):
            kind = self.binary(0)
            self.demand(")")
            return kind
        if self.kind == "number":
            self.advance()
            return "scalar"
        name = self.of("name")
        if name in AGGREGATIONS:
            return self.aggregation(name)
        return self.call(name) if self.kind == "sign" and self.token == "(" else self.selector(name)

    def labels(self):
        self.demand("(")
        found = {self.of("name")}
        while self.take(","):
            found.add(self.of("name"))
        self.demand(")")
        return found

    def aggregation(self, name):
        if self.take("by", "without"):
            self.grouped |= self.labels()
        kinds = self.arguments()
        if kinds != (["scalar", "vector"] if name in ("topk", "bottomk", "quantile") else ["vector"]):
            raise SyntaxError(f"{self.expression}: {name} of {kinds}")
        if self.take("by", "without"):
            self.grouped |= self.labels()
        return "vector"

    def call(self, name):
        if name not in FUNCTIONS:
            raise SyntaxError(f"{self.expression}: there is no function {name}")
        count, ranges = FUNCTIONS[name]
        kinds = self.arguments()
        if len(kinds) != count or {i for i, kind in enumerate(kinds) if kind == "range"} != ranges:
            raise SyntaxError(f"{self.expression}: {name} of {kinds}")
        return "scalar" if name == "time" else "vector"

    def arguments(self):
        self.demand("(")
        if self.take(")"):
            return []
        kinds = [self.binary(0)]
        while self.take(","):
            kinds.append(self.binary(0))
        self.demand(")")
        return kinds

    def selector(self, name):
        selector = Selector(name)
        if self.take("{"):
            while not self.take("}"):
                label = self.of("name")
                if not self.take("=", "!=", "=~", "!~"):
                    raise self.wrong("a matcher")
                selector.labels[label] = self.of("text").strip('"')
                if self.token != "}":
                    self.demand(",")
        kind = "vector"
        if self.take("["):
            self.of("duration", "variable")
            self.demand("]")
            kind = "range"
        if self.take("offset"):
            self.of("duration")
        self.selectors.append(selector)
        return kind
