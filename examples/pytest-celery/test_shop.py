"""Tests with a real broker and a real worker, which may die."""


def test_a_good_order_leaves_no_letter(celery_setup):
    result = celery_setup.app.send_task("shop.charge", (1,))
    assert result.get(timeout=30) == 1
    assert celery_setup.dlq.queues() == []


def test_an_unknown_order_is_dead_lettered(celery_setup):
    result = celery_setup.app.send_task("shop.charge", (-1,))
    letter = celery_setup.letter(result)
    assert (letter.reason, letter.description) == ("rejected", "no such order")


def test_a_task_that_kills_its_process_is_started_three_times(celery_setup):
    result = celery_setup.app.send_task("shop.render", (1,))
    letter = celery_setup.letter(result)
    assert letter.reason == "max_deliveries_exceeded"
    assert letter.deliveries == 3


def test_letters_outlive_the_worker(celery_setup):
    letter = celery_setup.letter(celery_setup.app.send_task("shop.charge", (-1,)))
    celery_setup.worker.restart()
    celery_setup.worker.wait_for_log("ready.")
    assert [one.id for one in celery_setup.dlq.letters("orders-DLQ")] == [letter.id]
