"""The arguments of a task as typed columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from builders import a_letter
from celery import Celery

from celery_dlq import DeadLetter
from celery_dlq.errors import DLQError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("pyspark")

Export = Callable[[Iterable[DeadLetter]], Path]


def called(*args: Any, task_name: str = "shop.charge", **kwargs: Any) -> DeadLetter:
    """A letter of a task that was called so."""
    return a_letter(task_name=task_name, args_json=json.dumps(args), kwargs_json=json.dumps(kwargs))


def test_arguments_are_typed_columns(spark: SparkSession, export: Export) -> None:
    """Each has its type, as SQL has it, whether it was passed by position or by name."""
    from celery_dlq.spark.triage import arguments, letters

    when = {"__type__": "datetime", "__value__": "2026-03-04T05:06:07"}
    price = {"__type__": "decimal", "__value__": "12.50"}
    folder = export(
        [
            called(7, 1.5, vip=True, at=when, price=price, tags=["a", "b"], big=10**20),
            called(8, amount=2, vip=False, at=when, price=price, note='it\'s\n"odd"', big=1),
            called(order_id=9, vip=None),
            called("other", task_name="shop.mail"),
        ]
    )
    found = arguments(letters(spark, folder), "shop.charge", ["order_id", "amount"])
    types = dict(found.dtypes)
    assert {name: types[name] for name in ("order_id", "amount", "vip", "price", "big")} == {
        "order_id": "bigint",
        "amount": "double",
        "vip": "boolean",
        "price": "decimal(38,9)",
        "big": "decimal(38,0)",
    }
    assert (types["at"], types["tags"], types["note"]) == ("timestamp", "string", "string")
    assert found.columns[:3] == ["id", "fingerprint", "reason"]
    columns = ("order_id", "amount", "vip", "price", "tags", "note", "big", "unfit")
    rows = found.selectExpr(*columns, "unix_micros(at) AS at").orderBy("order_id").collect()
    assert [row["order_id"] for row in rows] == [7, 8, 9]
    assert [row["amount"] for row in rows] == [1.5, 2.0, None]
    assert [row["vip"] for row in rows] == [True, False, None]
    assert rows[0]["price"] == Decimal("12.5")
    assert json.loads(rows[0]["tags"]) == ["a", "b"]
    assert rows[0]["big"] == 10**20
    assert rows[1]["note"] == 'it\'s\n"odd"'
    moment = datetime(2026, 3, 4, 5, 6, 7, tzinfo=timezone.utc)
    assert rows[0]["at"] == moment.timestamp() * 1e6
    assert [row["unfit"] for row in rows] == [None] * 3
    comment = found.schema["amount"].metadata["comment"]
    assert comment == "double; so were 2 of 2 values looked at".replace("double", "DOUBLE")


def test_what_does_not_fit_is_null_and_kept_as_text(spark: SparkSession, export: Export) -> None:
    """One bad value costs itself alone, and can be counted."""
    from celery_dlq.spark.triage import arguments, letters

    folder = export(
        [
            *(called(n, tenant=n % 3) for n in range(60)),
            called("none", tenant=1),
            a_letter(args_json='["x", 2, 3]', kwargs_json='{"tenant": 5, "tenant": 6}'),
            a_letter(args_json="[1", kwargs_json="{}"),
            a_letter(args_json=None, kwargs_json=None),
        ]
    )
    found = arguments(letters(spark, folder), "shop.charge", ["number"])
    assert dict(found.dtypes)["number"] == "bigint"
    assert found.count() == 64
    assert found.where("number IS NOT NULL AND unfit IS NULL").count() == 60
    unfit = sorted(row[0] for row in found.where("unfit IS NOT NULL").select("unfit").collect())
    assert unfit == ["args=[1", "number=none", "number=x"]
    (odd,) = found.where("unfit = 'number=none'").select("number", "tenant").collect()
    assert tuple(odd) == (None, 1)
    more = found.where("unfit = 'number=x'").select("arg_1", "arg_2", "tenant").collect()
    assert [tuple(row)[:2] for row in more] == [(2, 3)]


def test_a_type_that_is_asked_for_is_that_of_the_value(spark: SparkSession, export: Export) -> None:
    """Also of what kombu tags, however the type is spelled; what Java reads as a number is none."""
    from celery_dlq.spark.triage import arguments, letters

    tagged = {
        "price": {"__type__": "decimal", "__value__": "12.5"},
        "at": {"__type__": "datetime", "__value__": "2026-03-04T05:06:07"},
    }
    folder = export(
        [*(called(n, size=n + 0.5, **tagged) for n in range(60)), called(60, size="5d")]
    )
    asked = {"price": "DECIMAL(18,2)", "at": "timestamp"}
    found = arguments(letters(spark, folder), "shop.charge", types=asked)
    assert found.where("price = 12.5 AND at IS NOT NULL AND unfit IS NULL").count() == 60
    assert found.where("unfit IS NOT NULL").select("size", "unfit").collect() == [(None, "size=5d")]
    comment = found.schema["price"].metadata["comment"]
    assert comment == "DECIMAL(18,2), as asked for; 60 values looked at"


def test_names_come_from_the_signature_and_collide_with_nothing(
    spark: SparkSession, export: Export
) -> None:
    """Of a task or a function; an argument called as a column of the letter has another name."""
    from celery_dlq.spark.triage import arguments, letters

    app = Celery("x", set_as_current=False)

    @app.task(bind=True)
    def charge(self: Any, id: int, reason: str = "", *, ID: str = "") -> None:  # noqa: A002, N803
        """As apps have them."""

    odd = "it`s 'odd'.name\\"
    folder = export([called(5, "late", ID="z", **{odd: 1, "unfit": 2})])
    dead = letters(spark, folder)
    found = arguments(dead, "shop.charge", charge)
    (row,) = found.collect()
    values = row.asDict()
    assert (values["id_2"], values["reason_2"], values["ID_3"]) == (5, "late", "z")
    assert (values[odd], values["unfit_2"], values["unfit"]) == (1, 2, None)
    assert values["reason"] == "failed"
    plain = arguments(dead, "shop.charge", types={"arg_0": "STRING"})
    assert plain.select("arg_0", "arg_1").first() == ("5", "late")
    with pytest.raises(DLQError, match="expected a task that has letters, got 'shop"):
        arguments(dead, "shop.chrage")
    with pytest.raises(DLQError, match=r"types to name arguments of shop.charge: .*got amonut$"):
        arguments(dead, "shop.charge", types={"amonut": "BIGINT"})


def test_a_thousand_names_are_a_hundred_columns(spark: SparkSession, export: Export) -> None:
    """The most frequent ones; the others are in the text."""
    from celery_dlq.spark.triage import arguments, letters

    folder = export([called(common=n, **{f"name{n}": n}) for n in range(150)])
    found = arguments(letters(spark, folder), "shop.charge")
    assert len(found.columns) == 6 + 100 + 1
    assert "common" in found.columns
    assert found.where("unfit LIKE 'name%=%'").count() == 51
