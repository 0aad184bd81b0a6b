"""Tool calls in the Hermes form: offered functions, requests that need them, and results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tools.demo_model import world
from tools.demo_model.chatml import Message, tool_call, tool_response
from tools.demo_model.skills import Exchange, as_typed
from tools.demo_model.world import Draw

Value = str | int


@dataclass(frozen=True)
class Parameter:
    """A parameter under one of several names, and its values."""

    names: tuple[str, ...]
    value: Callable[[Draw], Value]
    json_type: str = "string"


@dataclass(frozen=True)
class ToolKind:
    """A function the model may call: its names, requests with `{0}`, `{1}`, and its result."""

    names: tuple[str, ...]
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    result: Callable[[Draw], Mapping[str, Value]]
    reply: str


def _city(draw: Draw) -> Value:
    return world.city(draw)


def _name(draw: Draw) -> Value:
    return world.name(draw)


def _word(draw: Draw) -> Value:
    return world.word(draw)


def _small_number(draw: Draw) -> Value:
    return draw.copyable(lambda: draw.number(0, 100), world.SMALL_NUMBERS)


KINDS = (
    ToolKind(
        ("get_weather", "weather", "get_current_weather"),
        "Get the current weather",
        (Parameter(("city", "location", "place"), _city),),
        ("What is the weather in {0}?", "How is the weather in {0}?", "What's the weather in {0}?",
         "What is the weather like in {0}?", "Tell me the weather in {0}."),
        lambda draw: {"temperature": draw.number(0, 35), "sky": draw.pick(("sunny", "cloudy"))},
        "It is {temperature} degrees and {sky}.",
    ),
    ToolKind(
        ("get_time", "time", "current_time"),
        "Get the local time",
        (Parameter(("city", "place", "location"), _city),),
        ("What time is it in {0}?", "Tell me the time in {0}.", "What is the time in {0}?"),
        lambda draw: {"time": f"{draw.number(0, 23)}:{draw.number(10, 59)}"},
        "It is {time}.",
    ),
    ToolKind(
        ("add", "add_numbers", "calculator"),
        "Add two numbers",
        (Parameter(("a", "x"), _small_number, "integer"),
         Parameter(("b", "y"), _small_number, "integer")),
        ("What is {0} plus {1}?", "Add {0} and {1}.", "What is {0} + {1}?"),
        lambda draw: {"result": draw.number(0, 200)},
        "The result is {result}.",
    ),
    ToolKind(
        ("search", "web_search", "find"),
        "Search for a text",
        (Parameter(("query", "q", "text"), _word),),
        ("Search for {0}.", "Find {0}.", "Look up {0}."),
        lambda draw: {"hits": draw.number(0, 100)},
        "I found {hits} results.",
    ),
    ToolKind(
        ("send_message", "send"),
        "Send a message to a person",
        (Parameter(("to", "name", "person"), _name), Parameter(("text", "message"), _word)),
        ("Send {0} the message {1}.", "Write to {0}: {1}.", "Tell {0} {1}."),
        lambda draw: {"status": draw.pick(("sent", "failed"))},
        "The message was {status}.",
    ),
    ToolKind(
        ("set_light", "light"),
        "Set the colour of a light",
        (Parameter(("room", "place"), _word),
         Parameter(("color", "colour"), lambda draw: draw.pick(world.COLOURS))),
        ("Make the light in the {0} {1}.", "Set the light in the {0} to {1}."),
        lambda draw: {"status": draw.pick(("done", "failed"))},
        "The light is {status}.",
    ),
    ToolKind(
        ("set_timer", "timer", "start_timer"),
        "Start a timer",
        (Parameter(("minutes", "duration"), _small_number, "integer"),),
        ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Timer for {0} minutes."),
        lambda draw: {"status": draw.pick(("started", "failed"))},
        "The timer is {status}.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """A kind of tool with chosen names, as offered in one conversation."""

    kind: ToolKind
    name: str
    parameters: tuple[str, ...]

    def schema(self, draw: Draw) -> dict[str, object]:
        """Returns the function signature, keys sorted in some draws as some renderers do."""
        properties: dict[str, object] = {
            chosen: {"type": parameter.json_type}
            for chosen, parameter in zip(self.parameters, self.kind.parameters, strict=True)
        }
        parameters = {
            "type": "object",
            "properties": properties,
            "required": list(self.parameters),
        }
        function: dict[str, object] = {"name": self.name}
        if draw.chance(0.8):
            function["description"] = self.kind.description
        if draw.chance(0.4):
            parameters = dict(sorted(parameters.items()))
            ordered = dict(sorted({**function, "parameters": parameters}.items()))
            return {"function": ordered, "type": "function"}
        return {"type": "function", "function": {**function, "parameters": parameters}}


def offer(draw: Draw, amount: int) -> tuple[Tool, ...]:
    """Returns `amount` different tools to offer in one conversation."""
    return tuple(
        Tool(kind, draw.pick(kind.names), tuple(draw.pick(p.names) for p in kind.parameters))
        for kind in draw.rng.sample(KINDS, amount)
    )


def call(draw: Draw, tool: Tool, *, answered: bool) -> Exchange:
    """Returns a request and the call it needs; with `answered` also the result and the reply."""
    values = [parameter.value(draw) for parameter in tool.kind.parameters]
    text = draw.typed(draw.pick(tool.kind.requests).format(*values))
    typed = [as_typed(text, v) if isinstance(v, str) else v for v in values]
    arguments = dict(zip(tool.parameters, typed, strict=True))
    messages = [Message("user", text), Message("assistant", tool_call(tool.name, arguments))]
    if answered:
        result = tool.kind.result(draw)
        messages.append(Message("user", tool_response(result)))
        messages.append(Message("assistant", tool.kind.reply.format(**result)))
    return Exchange("tools", tuple(messages))
