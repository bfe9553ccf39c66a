// What pages do beyond HTML: fresh numbers, local times, ticked rows, copying. All works without.
"use strict";
(() => {
  const page = document.documentElement;
  const root = encodeURI(page.dataset.root || "");
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const put = (element, text) => {
    if (element && element.textContent !== text) element.textContent = text;
  };
  const number = (value) => value.toLocaleString("en-US");

  // -- Times: relative ones stay right, all have the viewer's zone ------------------------------

  const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  // The server's clock counts: the viewer's may be wrong.
  const served = Date.parse(document.querySelector("footer time")?.dateTime);
  const off = served - Date.now();
  const skew = Number.isNaN(off) || Math.abs(off) < 5000 ? 0 : off;

  const span = (seconds) => {
    const unit = UNITS.find(([length]) => seconds >= 2 * length) || [1, "s"];
    return `${Math.floor(seconds / unit[0])} ${unit[1]}`;
  };
  const localText = (date) => {
    const parts = new Intl.DateTimeFormat("en-CA", {
      year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit",
      second: "2-digit", hourCycle: "h23", timeZoneName: "short",
    }).formatToParts(date);
    const part = (type) => parts.find((one) => one.type === type)?.value || "";
    return `${part("year")}-${part("month")}-${part("day")} ` +
      `${part("hour")}:${part("minute")}:${part("second")} ${part("timeZoneName")}`;
  };
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";

  const showLocal = (time) => {
    const date = new Date(time.dateTime);
    if (Number.isNaN(date.getTime())) return;
    const utc = `${date.toISOString().slice(0, 19).replace("T", " ")} UTC`;
    time.title = `${localText(date)} (${zone}), ${utc}`;
    const local = localText(date);
    const same = date.getTimezoneOffset() === 0;
    if (time.dataset.at !== undefined && !same) put(time, `${local} (${utc.slice(11)})`);
  };
  const showAgo = () => all("time[data-ago]").forEach((time) => {
    const seconds = (Date.now() + skew - Date.parse(time.dateTime)) / 1000;
    if (Number.isNaN(seconds)) return;
    put(time, seconds >= 0 ? `${span(seconds)} ago` : `in ${span(-seconds)}`);
  });

  all("time[data-ago], time[data-at]").forEach(showLocal);
  showAgo();
  setInterval(showAgo, 10000);

  // -- What is said to those who do not see the page ---------------------------------------------

  let saidAt = 0, toSay = "", later;
  const say = (text) => {
    toSay = text;
    clearTimeout(later);
    later = setTimeout(() => {
      saidAt = Date.now();
      put(document.getElementById("live"), toSay);
    }, Math.max(0, saidAt + 10000 - Date.now()));
  };

  // -- Fresh numbers -----------------------------------------------------------------------------

  const ENDED = ["done", "cancelled", "stopped", "failed"];
  let last = null, reloading = false;

  const apply = (state) => {
    if (state.at * 1000 < served) return;  // older than the page
    last = state;
    if (state.away) {
      say("The store does not answer; the numbers are old.");
      return;
    }
    let more = 0;
    all("[data-live]").forEach((element) => {
      const [, kind, name] = /^(\w+):([^]*)$/.exec(element.dataset.live) || [];
      const value = state[kind]?.[name];
      if (typeof value !== "number") return;
      const before = Number(element.textContent.replace(/\D/g, ""));
      if (kind === "letters") more += Math.max(0, value - before);
      put(element, number(value));
    });
    if (more) say(`${number(more)} new ${more === 1 ? "letter" : "letters"}.`);
    all(".new-letters[data-queue]").forEach((element) => newLetters(element, state));
    all("[data-job]").forEach((element) => showJob(element, state.jobs?.[element.dataset.job]));
    showInForce(state.in_force);
  };

  // What is in force is made by the server: a page asks for its own strip anew when that changes.
  let asksForStrip = false;
  const showInForce = async (names) => {
    const strip = document.getElementById("in-force");
    if (!strip || !names || asksForStrip || strip.dataset.names === names.join(" ")) return;
    asksForStrip = true;
    try {
      const answer = await fetch(`${root}/`, {cache: "no-store", redirect: "manual"});
      const found = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = found.getElementById("in-force");
      if (!fresh || strip.contains(document.activeElement)) return;  // no button moves under a key
      if (document.querySelector(".refresh")) {  // no page that a form led to
        all("input[name=back]", fresh).forEach((input) => {
          input.value = location.pathname + location.search;
        });
      }
      const unfolded = strip.querySelector("details[open]") !== null;
      strip.replaceChildren(...fresh.childNodes);
      strip.querySelector("details")?.toggleAttribute("open", unfolded);
      strip.dataset.names = names.join(" ");
      all("time[data-ago], time[data-at]", strip).forEach(showLocal);
      say("What is in force has changed.");
    } catch { /* asked again */ } finally {
      asksForStrip = false;
    }
  };

  const newLetters = (element, state) => {
    const now = state.letters?.[element.dataset.queue];
    if (typeof now !== "number") return;
    element.dataset.letters ??= String(now);
    const more = now - Number(element.dataset.letters);
    if (more <= 0) {
      delete element.dataset.some;
      return;
    }
    let link = element.querySelector("a");
    if (!link) {
      link = document.createElement("a");
      const query = new URLSearchParams(location.search);
      query.delete("cursor");
      link.href = `${location.pathname}?${query}`;
      element.replaceChildren(link);
    }
    const text = `${number(more)} new ${more === 1 ? "letter" : "letters"}, show`;
    put(link, text);
    element.dataset.some = "";
    say(`${text}.`);
  };

  // The tab of a job's page says how far it is: one need not look at the page.
  const title = document.title;
  const showTitle = (element, job) => {
    const phase = element.querySelector("[data-phases] [aria-current]");
    const part = job?.total ? `${number(job.counts.handled)} of ${number(job.total)}` : "";
    const far = phase
      ? phase.textContent.trim().replace(/\s+/g, " ").split(/[,;]/)[0].toLowerCase()
      : `${element.dataset.state} ${part}`.trim();
    document.title = [far, title.replace(/: \w+/, "")].join(" · ");
  };

  const showJob = (element, job) => {
    if (!job) return;
    const before = element.dataset.state;
    element.dataset.state = job.state;
    put(element.querySelector("[data-job-state]"), job.state);
    all("[data-count]", element).forEach((count) => {
      const value = job.counts[count.dataset.count];
      if (typeof value !== "number") return;
      put(count, number(value));
      if (value && count.parentElement.hidden) count.parentElement.hidden = false;
    });
    const bar = element.querySelector("progress");
    if (bar && job.total) {
      bar.max = job.total;
      bar.value = Math.min(job.counts.handled, job.total);
    }
    if (element.dataset.titled !== undefined) showTitle(element, job);
    const left = element.querySelector("[data-left]");
    if (left) put(left, typeof job.left === "number" ? `${span(job.left)} left` : "");
    if (!before || before === job.state || element.closest("#in-force")) return;
    say(`Job ${job.state}.`);
    // What somebody types is not thrown away.
    const typing = document.activeElement?.matches("input, textarea, select");
    if (!ENDED.includes(job.state) || ENDED.includes(before) || reloading || typing) return;
    try {  // once for each end, whatever the page then says; a resumed job ends again
      const key = `dlq-ended:${element.dataset.job}`, end = String(job.ended_at);
      if (sessionStorage.getItem(key) === end) return;
      sessionStorage.setItem(key, end);
    } catch {
      return;
    }
    reloading = true;
    location.reload();
  };

  // -- A job that runs, or whose messages still run: its page asks how far they are ----------------

  const GOING = ["running", "waiting"];
  const askFor = async (element, pause) => {
    if (!reloading) {
      try {
        const answer = await fetch(location.href, {cache: "no-store", redirect: "manual"});
        const found = new DOMParser().parseFromString(await answer.text(), "text/html");
        const fresh = found.querySelector("[data-job][data-state]");
        if (fresh?.dataset.job !== element.dataset.job) return;
        all("[data-count]", element).forEach((count) => {
          const other = fresh.querySelector(`[data-count=${count.dataset.count}]`);
          if (!other) return;
          put(count, other.textContent);
          count.parentElement.hidden = other.parentElement.hidden;
        });
        ["[data-phases]", "[data-next]"].forEach((name) => {
          const [old, other] = [document, found].map((one) => one.querySelector(name));
          const used = old?.contains(document.activeElement);  // no button moves under a key
          if (old && other && !used) old.replaceChildren(...other.childNodes);
        });
        showTitle(element);
        if (GOING.includes(fresh.dataset.state)) pause = 2000 / 1.2;
        else if (!fresh.dataset.unknown) return;
      } catch { /* asked again */ }
    }
    // Of an ended job for some minutes; less often in a tab of which only the title is seen.
    const next = pause * 1.2;
    if (pause < 60000) setTimeout(askFor, Math.max(next, document.hidden ? 10000 : 0), element, next);
  };
  all("[data-job][data-titled]").forEach((element) => {
    if (GOING.includes(element.dataset.state) || element.dataset.unknown) {
      showTitle(element);
      setTimeout(askFor, 2000, element, 2000);
    }
  });

  // One tab of a browser asks the server, the others hear it from that one: browsers open only six
  // connections to a server. Without locks (plain http by name) each tab asks now and then.
  const name = `dlq-live:${root}`;
  const channel = "BroadcastChannel" in window ? new BroadcastChannel(name) : null;
  const shares = Boolean(channel && navigator.locks);
  const POLL = 3000;
  let loggedOut = false, timer = null, leading = false;

  const heard = (state) => {
    apply(state);
    if (leading) channel?.postMessage({state});
  };
  const poll = async () => {
    clearTimeout(timer);
    try {
      const answer = await fetch(`${root}/events/poll`, {cache: "no-store", redirect: "manual"});
      // Django sends who is not logged in to its login page.
      if (answer.type === "opaqueredirect" || answer.status === 401 || answer.status === 403) {
        loggedOut = true;
        say("You are not logged in any more; reload the page.");
        return;
      }
      if (answer.ok) heard(await answer.json());
    } catch {
      say("The server does not answer; the numbers are old.");
    }
    if (asking()) timer = setTimeout(poll, POLL);
  };
  const asking = () => !document.hidden && !loggedOut && (leading || !shares);

  let release = null, waiting = null;
  const show = () => {
    if (loggedOut || waiting || !document.querySelector("#live")) return;
    waiting = new AbortController();
    if (!shares) {
      poll();
      return;
    }
    channel.postMessage({ask: true});
    navigator.locks.request(name, {signal: waiting.signal}, () => new Promise((done) => {
      release = done;
      leading = true;
      poll();
    })).catch(() => {});
  };
  const hide = () => {
    clearTimeout(timer);
    leading = false;
    waiting?.abort();
    waiting = null;
    release?.();
    release = null;
  };

  if (channel) {
    channel.onmessage = ({data}) => {
      if (data.ask && leading && last) channel.postMessage({state: last});
      if (data.state && !document.hidden) apply(data.state);
    };
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? hide() : show()));
  window.addEventListener("pagehide", hide);
  window.addEventListener("pageshow", (event) => { if (event.persisted && !document.hidden) show(); });
  if (!document.hidden) show();

  // -- Ticked rows -------------------------------------------------------------------------------

  const boxes = (form) => all("input[type=checkbox][name=ids]", form);
  const count = (form) => {
    const ticked = boxes(form).filter((box) => box.checked).length;
    all("[data-ticked]", form).forEach((element) => put(element, `${number(ticked)} ticked`));
    all("input[data-tick-all]", form).forEach((box) => {
      box.checked = ticked > 0 && ticked === boxes(form).length;
      box.indeterminate = ticked > 0 && !box.checked;
    });
  };
  all("[data-tick-all]").forEach((control) => {
    const form = control.form || document;
    control.hidden = false;
    if (control.parentElement.hidden) control.parentElement.hidden = false;
    control.addEventListener("click", () => {
      const tick = control.type === "checkbox"
        ? control.checked : boxes(form).some((box) => !box.checked);
      boxes(form).forEach((box) => { box.checked = tick; });
      count(form);
    });
    form.addEventListener("change", () => count(form));
    count(form);
  });

  // -- A search that was cut off: one click asks again and again, until a letter is found ---------

  const searchOn = async (link) => {
    let from = link.getAttribute("href"), searched = 0, next = link;
    try {
      while (next) {
        searched += Number(next.dataset.searched);
        from = next.getAttribute("href");
        put(link, `Searching, ${number(searched)} letters so far …`);
        const found = new DOMParser().parseFromString(await (await fetch(from)).text(), "text/html");
        next = found.querySelector("input[name=ids]") ? null : found.querySelector("a[data-searched]");
      }
    } finally {
      link.ariaBusy = null;
      location.assign(from);  // it also says what went wrong
    }
  };
  all("a[data-searched]").forEach((link) => link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    if (!link.ariaBusy) { link.ariaBusy = "true"; searchOn(link); }
  }));

  // -- The search of every page: its key, and completions of what somebody types -------------------

  const field = document.getElementById("find");
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (!field || event.target.closest("input, textarea, select, [contenteditable]")) return;
    event.preventDefault();
    field.focus();
    field.select();
  });
  let completing;
  const complete = async () => {
    const typed = field.value;
    try {
      const answer = await fetch(`${field.dataset.words}?${new URLSearchParams({q: typed})}`, {redirect: "manual"});
      if (!answer.ok || field.value !== typed) return;
      field.list.replaceChildren(...(await answer.json()).map((text) => new Option("", text)));
    } catch { /* one types it whole */ }
  };
  field?.addEventListener("input", () => {
    clearTimeout(completing);
    completing = setTimeout(complete, 150);
  });

  // -- Copying: the text itself, or that of an element (#id) ---------------------------------------

  const copied = async (button) => {
    const asked = button.dataset.copy;
    const from = asked.startsWith("#") ? document.getElementById(asked.slice(1)) : null;
    const text = from ? from.textContent : asked;
    try {
      await navigator.clipboard.writeText(text);
      const before = button.textContent;
      put(button, "Copied");
      setTimeout(() => put(button, before), 1500);
    } catch {  // only https pages may: give it selected
      const box = document.createElement("textarea");
      box.readOnly = true;
      box.value = text;
      box.setAttribute("aria-label", "Text to copy");
      button.after(box);
      box.select();
    }
  };
  all("button[data-copy]").forEach((button) => {
    button.type = "button";
    button.hidden = false;
    button.addEventListener("click", () => copied(button));
  });

  // -- Forms are sent once -------------------------------------------------------------------------

  all("form[method=post]").forEach((form) => form.addEventListener("submit", (event) => {
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = "yes";
  }));
  window.addEventListener("pageshow", () => all("form").forEach((form) => {
    delete form.dataset.sent;
  }));
})();
