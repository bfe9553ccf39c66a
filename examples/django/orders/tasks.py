"""The tasks of the shop: found by Celery's autodiscovery."""

from celery import shared_task
from django.db import OperationalError

from celery_dlq import RejectToDLQ, dead_letter_policy
from orders.models import Order


@shared_task(autoretry_for=(OperationalError,), max_retries=3)
@dead_letter_policy(max_deliveries=2)  # beats the queue's policy
def charge(order_id):
    """Take the customer's money."""
    try:
        order = Order.objects.get(pk=order_id)
    except Order.DoesNotExist as exc:
        # No retry will help: a person has to look at it.
        raise RejectToDLQ(f"there is no order {order_id}") from exc
    order.paid = True
    order.save()
