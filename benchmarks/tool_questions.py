"""40 questions for tools, in eight sets of functions as an agent or an assistant would have them.

Each question names the function that answers it. Schemas have what schemas of agents have: enumerations, numbers with
bounds, patterns, nested objects, lists of objects, optional fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}


def _choice(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _number(least: float, most: float) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most}


def _whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _list(items: Schema, most: int = 8) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _object(optional: tuple[str, ...] = (), /, **fields: Schema) -> Schema:
    required = [name for name in fields if name not in optional]
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


DATE: Schema = {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$", "description": "as 2026-11-27"}
TIME: Schema = {"type": "string", "pattern": r"^[0-2]\d:[0-5]\d$", "description": "as 09:30"}
AIRPORT: Schema = {"type": "string", "pattern": "^[A-Z]{3}$", "description": "code of an airport"}
ROOM = _choice("kitchen", "living_room", "bedroom", "bathroom", "office")


@dataclass(frozen=True)
class Question:
    """tools: the name of a set. function: the one that answers the question."""

    tools: str
    text: str
    function: str


def _tool(name: str, description: str, optional: tuple[str, ...] = (), /, **fields: Schema) -> Schema:
    parameters = _object(optional, **fields)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: Mapping[str, list[Schema]] = {
    "weather": [
        _tool(
            "get_forecast",
            "The weather of the coming days at a place.",
            ("units",),
            city=TEXT,
            country=TEXT,
            num_days=_whole(1, 14),
            units=_choice("metric", "imperial"),
        ),
        _tool("get_air_quality", "How clean the air is now.", city=TEXT, pollutant=_choice("pm25", "no2", "o3")),
    ],
    "calendar": [
        _tool(
            "create_event",
            "Put an event into the calendar.",
            ("location", "reminder_minutes"),
            title=TEXT,
            date=DATE,
            start_time=TIME,
            duration_minutes=_whole(5, 1440),
            attendees=_list(TEXT),
            location=TEXT,
            reminder_minutes=_whole(0, 10080),
        ),
        _tool("find_free_time", "When everybody is free.", people=_list(TEXT), date=DATE, minutes=_whole(5, 480)),
        _tool("cancel_event", "Remove an event.", title=TEXT, date=DATE, notify_attendees=BOOLEAN),
    ],
    "files": [
        _tool("read_file", "The lines of a file.", path=TEXT, first_line=_whole(1, 10**6), last_line=_whole(1, 10**6)),
        _tool(
            "search_files",
            "Lines that an expression matches.",
            ("file_types",),
            expression=TEXT,
            folder=TEXT,
            file_types=_list(TEXT),
            ignore_case=BOOLEAN,
        ),
        _tool(
            "edit_file",
            "Replace text in a file.",
            path=TEXT,
            edits=_list(_object(old_text=TEXT, new_text=TEXT, replace_all=BOOLEAN), 4),
        ),
        _tool("run_tests", "Run tests and return what failed.", paths=_list(TEXT), stop_at_first=BOOLEAN),
    ],
    "shop": [
        _tool(
            "search_products",
            "Products that fit.",
            ("filters",),
            query=TEXT,
            sort_by=_choice("price_ascending", "price_descending", "rating", "newest"),
            filters=_object(
                ("brand", "least_rating"),
                most_price=_number(0, 100000),
                brand=TEXT,
                least_rating=_number(0, 5),
                in_stock=BOOLEAN,
            ),
        ),
        _tool(
            "place_order",
            "Order products.",
            items=_list(_object(product_id={"type": "string", "pattern": r"^[A-Z]{2}-\d{4}$"}, quantity=_whole(1, 99))),
            shipping=_choice("standard", "express", "pickup"),
            gift_wrap=BOOLEAN,
        ),
    ],
    "home": [
        _tool(
            "set_light",
            "Change lights in a room.",
            ("colour",),
            room=ROOM,
            brightness_percent=_whole(0, 100),
            colour=_choice("warm_white", "cold_white", "red", "green", "blue"),
        ),
        _tool(
            "set_thermostat",
            "Set the temperature of a room.",
            room=ROOM,
            temperature_celsius=_number(5, 30),
            mode=_choice("heat", "cool", "auto", "off"),
        ),
        _tool("lock_door", "Lock or unlock a door.", door=_choice("front", "back", "garage"), locked=BOOLEAN),
    ],
    "mail": [
        _tool(
            "send_email",
            "Send a message.",
            ("cc",),
            to=_list(TEXT),
            cc=_list(TEXT),
            subject=TEXT,
            body=TEXT,
            priority=_choice("low", "normal", "high"),
        ),
        _tool(
            "search_email",
            "Messages that fit.",
            ("sender",),
            sender=TEXT,
            words=TEXT,
            since=DATE,
            has_attachment=BOOLEAN,
            most=_whole(1, 100),
        ),
    ],
    "data": [
        _tool(
            "query_table",
            "Rows of a table.",
            ("order_by",),
            table=_choice("orders", "customers", "products", "invoices"),
            columns=_list(TEXT),
            conditions=_list(
                _object(
                    column=TEXT,
                    operator=_choice("equals", "not_equals", "greater_than", "less_than", "contains"),
                    value={"anyOf": [TEXT, {"type": "number"}]},
                ),
                4,
            ),
            order_by=_object(column=TEXT, direction=_choice("ascending", "descending")),
            limit=_whole(1, 1000),
        ),
        _tool(
            "make_chart",
            "Draw a chart.",
            kind=_choice("line", "bar", "pie", "scatter"),
            x_column=TEXT,
            y_column=TEXT,
            title=TEXT,
        ),
    ],
    "travel": [
        _tool(
            "search_flights",
            "Flights between two airports.",
            ("return_date",),
            origin=AIRPORT,
            destination=AIRPORT,
            departure_date=DATE,
            return_date=DATE,
            passengers=_object(adults=_whole(1, 9), children=_whole(0, 9)),
            cabin=_choice("economy", "premium_economy", "business", "first"),
        ),
        _tool(
            "book_hotel",
            "Book a room.",
            city=TEXT,
            check_in=DATE,
            nights=_whole(1, 30),
            guests=_whole(1, 6),
            breakfast=BOOLEAN,
        ),
        _tool("convert_currency", "Convert an amount.", amount=_number(0, 10**9), from_currency=TEXT, to_currency=TEXT),
    ],
}

QUESTIONS: tuple[Question, ...] = tuple(
    Question(tools, text, function)
    for tools, asked in {
        "weather": {
            "get_forecast": [
                "Will it rain in Lisbon, Portugal, in the next three days?",
                "I am flying to Oslo in Norway tomorrow and stay for a week. What should I expect of the weather?",
                "Give me the ten-day forecast for Austin, United States, in Fahrenheit.",
            ],
            "get_air_quality": [
                "How much fine dust is in the air of Kraków right now?",
                "Is there a lot of ozone in Athens today?",
            ],
        },
        "calendar": {
            "create_event": [
                "Plan a design review with Ada and Grace on 3 December 2026 at half past two, 45 minutes, in room 4.",
                "Put lunch with Barbara on Friday, 4 December 2026, at noon, and remind me an hour before.",
            ],
            "find_free_time": ["When could Linus, Margaret and I meet for an hour on 14 December 2026?"],
            "cancel_event": [
                "The dentist's appointment on 2026-12-09 is off. There is nobody to tell.",
                "Cancel the weekly sync on 7 December 2026 and let everybody know.",
            ],
        },
        "files": {
            "read_file": ["Show me lines 120 to 180 of src/server/router.py."],
            "search_files": [
                "Where in src do we call parse_config, in Python files only?",
                "Find every TODO below lib, whatever its case.",
            ],
            "edit_file": ["In settings.yaml, change 'debug: true' to 'debug: false' and 'port: 8000' to 'port: 8080'."],
            "run_tests": ["Run the tests in tests/api and tests/models and stop at the first one that fails."],
        },
        "shop": {
            "search_products": [
                "Look for a mechanical keyboard below 120 euros that is in stock, best rated first.",
                "I want the cheapest running shoes of the brand Saucony with at least four stars.",
                "What are the newest headphones for less than 300?",
            ],
            "place_order": [
                "Order two of KB-1042 and one of MS-0007, express, wrapped as a gift.",
                "Please send me five HD-2201, I can pick them up.",
            ],
        },
        "home": {
            "set_light": ["Dim the bedroom to 20 percent, warm white.", "Switch the kitchen lights off."],
            "set_thermostat": [
                "Make the office 21.5 degrees warm.",
                "It is too hot in the living room: cool it down to 23.",
            ],
            "lock_door": ["Did I lock the garage? Lock it, please."],
        },
        "mail": {
            "send_email": [
                "Write to ada@example.com and copy grace@example.com: the release is moved to Monday. It is urgent.",
                "Tell team@example.com that the server will be down on Saturday from 8 to 10 in the morning.",
                "Thank linus@example.com for the review in two sentences.",
            ],
            "search_email": [
                "Find the messages of billing@example.com with an attachment since the first of October 2026.",
                "Which messages since 2026-11-01 talk about the audit? Ten are enough.",
            ],
        },
        "data": {
            "query_table": [
                "List the names and cities of customers whose country is Chile, at most 50.",
                "Show the 20 largest orders above 1000, id and total, largest first.",
                "Which products have 'cable' in their name and cost less than 15? Give name and price.",
            ],
            "make_chart": [
                "Draw a bar chart of revenue by month, called Revenue 2026.",
                "Make a pie chart of customers by country.",
            ],
        },
        "travel": {
            "search_flights": [
                "Two adults and a child from Vienna (VIE) to Lisbon (LIS) on 2026-12-20, back on 2027-01-03, economy.",
                "Find a business flight from JFK to LHR on the second of February 2027 for me alone.",
            ],
            "convert_currency": ["How much are 250 Swiss francs in Japanese yen?"],
            "book_hotel": [
                "Book a room in Ghent for two people, three nights from 11 December 2026, with breakfast.",
                "I need a hotel in Kyoto from 2027-04-01 for five nights, one guest, no breakfast.",
            ],
        },
    }.items()
    for function, texts in asked.items()
    for text in texts
)
