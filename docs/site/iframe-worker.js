// Runs the search inside a frame where a page was opened as a file: browsers start no worker there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.answer(data);
      this.loaded = new Promise((done) => {
        const script = frame.contentDocument.createElement("script");
        script.src = new URL(address, location.href);
        script.onload = done;
        frame.contentDocument.body.append(script);
      });
    }

    answer(data) {
      this.dispatchEvent(new MessageEvent("message", { data }));
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
