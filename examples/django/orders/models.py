"""The orders of the shop."""

from django.db import models


class Order(models.Model):
    """An order of a customer."""

    amount = models.DecimalField(max_digits=8, decimal_places=2)
    paid = models.BooleanField(default=False)

    def __str__(self):
        return f"order {self.pk}"
